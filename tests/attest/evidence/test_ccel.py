"""A TDX guest's event log counts only as far as it leads to the quoted RTMRs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.attest.evidence import Evidence, judge, parse_policy
from sealring.attest.evidence.tpm.event_log import RTMR_NAMES, check_log, matching_log, read_log
from sealring.attest.evidence.tpm.structures import SHA384 as BANK
from sealring.errors import AttestationError
from tests.attest.evidence.judging import Judge
from tests.attest.minting import CHALLENGE
from tests.attest.minting.intel import MRTD, Intel
from tests.attest.minting.tpm import Measured, event_log

INTEL = Intel()
JUDGE = Judge(lambda: CHALLENGE, INTEL.trust)
SHA384 = ((12, 48),)
BOOT = (
    Measured(1, 0x80000001, b"SecureBoot=1"),
    Measured(2, 0x80000003, b"boot loader"),
    Measured(2, 0x80000003, b"kernel"),
    Measured(3, 13, b"console=hvc0"),
)


def rtmrs(events: tuple[Measured, ...]) -> dict[int, bytes]:
    """The RTMRs after these events, computed independently of the verifier's code."""
    values: dict[int, bytes] = {}
    for event in events:
        digest = hashlib.sha384(event.content).digest()
        before = values.get(event.pcr - 1, bytes(48))
        values[event.pcr - 1] = hashlib.sha384(before + digest).digest()
    return values


LOG = event_log(BOOT, SHA384)
HELD = {f"rtmr{n}": value.hex() for n, value in rtmrs(BOOT).items()}
PLAIN = INTEL.evidence(rtmrs=rtmrs(BOOT))


def logged(log: bytes) -> Evidence:
    return replace(PLAIN, parts={**PLAIN.parts, "event_log": log})


def test_events_are_those_of_a_log_that_leads_to_the_rtmrs() -> None:
    worker = JUDGE.verify(logged(LOG))
    expected = tuple(hashlib.sha384(text).hexdigest() for text in (b"boot loader", b"kernel"))
    assert worker.events["rtmr1"] == expected
    assert set(worker.events) == {"rtmr0", "rtmr1", "rtmr2"}
    assert JUDGE.verify(PLAIN).events == {}


def test_a_log_that_hides_or_invents_something() -> None:
    more = (*BOOT, Measured(2, 13, b"rootkit"))
    elsewhere = (*BOOT, Measured(9, 13, b"no such register"))
    for events in (BOOT[:2], more, tuple(reversed(BOOT)), elsewhere):
        said = JUDGE.refused("evidence.forged_evidence", logged(event_log(events, SHA384)))
        assert "does not lead to" in said
    with pytest.raises(AttestationError):
        JUDGE.verify(logged(event_log(BOOT)))
    JUDGE.refused("evidence.malformed_evidence", logged(LOG[:-1]))
    sgx = INTEL.evidence("sgx")
    extra = replace(sgx, parts={**sgx.parts, "event_log": LOG})
    JUDGE.refused("evidence.malformed_evidence", extra, INTEL.trust(INTEL.collateral("sgx")))


def test_a_policy_that_lists_events() -> None:
    worker = JUDGE.verify(logged(LOG))
    loader, kernel = worker.events["rtmr1"]
    policy = f"""version = 1
[tdx]
measurements = ["{MRTD.hex()}"]
events = {{rtmr1 = ["{loader}", "{kernel}"]}}
unchecked = ["rtmr0", "rtmr2"]
"""

    def failed(text: str, shown: object = worker) -> list[tuple[str, object]]:
        rules = judge(parse_policy(text), shown, None).rules  # type: ignore[arg-type]
        return [(one.name, one.refusal) for one in rules if one.refusal]

    assert failed(policy) == []
    other = policy.replace(kernel, "00" * 48)
    assert failed(other) == [("rtmr1 events", "policy.measurement_not_allowed")]
    assert failed(policy, JUDGE.verify(PLAIN)) == [
        ("rtmr1 events", "policy.measurement_not_allowed")
    ]


@pytest.mark.parametrize("filling", [b"", b"\xff" * 500, bytes(500), b"\xff" * 3])
def test_this_guests_own_log(filling: bytes, tmp_path: Path) -> None:
    path = tmp_path / "CCEL"
    path.write_bytes(LOG + filling)
    assert read_log(path) == LOG + filling
    assert matching_log(LOG + filling, HELD, BANK, RTMR_NAMES) == LOG
    # Something extended RTMR 2 at run time without an entry in the log.
    later = HELD | {"rtmr2": "ab" * 48}
    kept = matching_log(LOG + filling, later, BANK, RTMR_NAMES)
    assert set(check_log(kept, later, BANK, RTMR_NAMES)) == {"rtmr0", "rtmr1"}
    assert matching_log(LOG + filling, {}, BANK, RTMR_NAMES) == b""
    none = read_log(tmp_path / "none")
    assert matching_log(none, HELD, BANK, RTMR_NAMES) == none == b""
