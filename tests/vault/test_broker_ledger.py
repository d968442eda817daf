"""Answers of a broker that are older than earlier ones: recorded and sent again, or put back."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from sealring.attest.broker import enrolment
from sealring.attest.broker.client import Answered
from sealring.core.hooks import VaultEntry as Entry
from sealring.errors import RolledBack
from sealring.vault.ledger import BrokerLedger

VAULT = "0" * 32
ONE, TWO = "1" * 32, "2" * 32


class Broker:
    """Gives the answers that it was told, in their order."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def ask(self, say: Any) -> Any:
        return self.answers.pop(0)


def entry(name: str, version: int, content: str = "a") -> Entry:
    return Entry(name, version, content * 64)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    monkeypatch.setenv("SEALRING_BROKER", "https://broker")
    monkeypatch.setattr(enrolment, "this_worker", lambda: made)
    monkeypatch.setenv("SEALRING_JOB", secrets.token_hex(8))  # answers are kept by job
    return made


BEFORE = Answered(2, 5, [entry(ONE, 3), entry(TWO, 1)])


@pytest.mark.parametrize(
    "older",
    [
        Answered(2, 4, BEFORE.entries),
        Answered(1, 9, BEFORE.entries),
        Answered(0, 0, []),
        Answered(2, 5, [entry(ONE, 2), entry(TWO, 1)]),
        Answered(2, 5, [entry(ONE, 3)]),
        Answered(2, 5, [entry(ONE, 3, "b"), entry(TWO, 1)]),
        Answered(3, 6, [entry(ONE, 2), entry(TWO, 9)]),
    ],
)
@pytest.mark.threat("V12")
def test_an_older_answer_is_refused_also_when_the_vault_is_opened_again(
    broker: Broker, older: Answered
) -> None:
    newer = Answered(3, 6, [entry(ONE, 4, "b"), entry(TWO, 1), entry("3" * 32, 1)])
    broker.answers = [BEFORE, older, older, BEFORE, newer, BEFORE]
    ledger = BrokerLedger(VAULT)
    assert ledger.state() == (2, 5)
    for again in (ledger, BrokerLedger(VAULT)):
        with pytest.raises(RolledBack, match="https://broker answers with older records"):
            again.state()
        assert again.entries()[ONE] == Entry(ONE, 3, "a" * 64)
    assert ledger.state() == (2, 5)
    assert ledger.state() == (3, 6)
    with pytest.raises(RolledBack):
        ledger.state()
    assert ledger.entries()[ONE] == Entry(ONE, 4, "b" * 64)


@pytest.mark.threat("V12")
def test_an_older_answer_to_a_record_is_refused(broker: Broker) -> None:
    told = Entry(ONE, 4, "b" * 64)
    broker.answers = [
        BEFORE,
        Answered(2, 5, [entry(ONE, 3)]),
        Answered(2, 4, [entry(ONE, 4, "b")]),
        Answered(2, 5, []),
        Answered(2, 5, [entry(ONE, 4, "b")]),
    ]
    ledger = BrokerLedger(VAULT)
    ledger.state()
    for _ in range(3):
        with pytest.raises(RolledBack, match="older"):
            ledger.record(2, 5, told)
    ledger.record(2, 5, told)
    assert ledger.entries()[ONE] == told


def test_each_vault_has_answers_of_its_own(broker: Broker) -> None:
    broker.answers = [BEFORE, Answered(0, 0, [])]
    assert BrokerLedger(VAULT).state() == (2, 5)
    assert BrokerLedger("f" * 32).state() == (0, 0)
