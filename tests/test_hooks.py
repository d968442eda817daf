"""The core runs without attestation, vault, recording and live view, which it reaches by hooks."""

from __future__ import annotations

import inspect
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sealring.core import hooks
from sealring.core.hooks import GroupMade, Made, Slot, enrolment_of, group_observers
from sealring.errors import ConfigurationError
from tests.ports import free_port
from tests.workers import Workers

SATELLITES = ("attest", "observe", "record", "vault")

CORE_ALONE = """
import contextlib
import sys
import sealring.core.hooks

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"sealring.{each}" for each in SATELLITES)):
            raise ModuleNotFoundError(f"{name} is absent")

sys.meta_path.insert(0, Absent())
stack = contextlib.ExitStack()
for slot in vars(sealring.core.hooks).values():
    if isinstance(slot, sealring.core.hooks.Slot):
        stack.enter_context(slot.only())
import torch
import torch.distributed as dist

dist.init_process_group("sealring")
tensor = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
assert tensor.eq(3).all()
dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
dist.destroy_process_group()
print("all-reduced")
"""


def test_the_core_forms_a_group_where_no_satellite_can_be_imported(tmp_path: Path) -> None:
    script = f"SATELLITES = {SATELLITES!r}\n{CORE_ALONE}"
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "SEALRING_SECRET": secrets.token_hex(32),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=120) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], said
    assert [out for out, _ in said] == ["all-reduced\n"] * 2


@pytest.fixture
def no_providers() -> Iterator[None]:
    """Removes all providers during the test."""
    with ExitStack() as stack:
        for each in vars(hooks).values():
            if isinstance(each, Slot):
                stack.enter_context(each.only())
        yield


def test_a_broker_without_a_provider_is_an_error_and_no_other_identity(no_providers: None) -> None:
    environ = {"SEALRING_BROKER": "https://broker:8443", "SEALRING_SECRET": "5a" * 32}
    with pytest.raises(ConfigurationError, match="joining through SEALRING_BROKER needs one"):
        enrolment_of(0, 2, environ, 0.0)
    assert enrolment_of(0, 2, {"SEALRING_SECRET": "5a" * 32}, 0.0) is None


def test_two_providers_of_credentials_are_refused() -> None:
    environ = {"SEALRING_BROKER": "https://broker:8443"}
    with (
        hooks.enrolments.only("sealring.attest.broker:enrolled", "sealring.attest.broker:enrolled"),
        pytest.raises(ConfigurationError, match="names 2"),
    ):
        enrolment_of(0, 2, environ, 0.0)


def test_every_slot_has_providers_that_exist() -> None:
    slots = [each for each in vars(hooks).values() if isinstance(each, Slot)]
    assert slots
    for slot in slots:
        assert slot.all()
    for observe in group_observers.all():
        assert list(inspect.signature(observe).parameters) == ["environ"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SEALRING_TRACE", "/dev/null/traces", "cannot be made: Not a directory"),
        ("SEALRING_TRACE", "traces:KILL", "set it to FOLDER, FOLDER:USR1 or FOLDER:USR2"),
        ("SEALRING_TRACE", ":USR1", "set it to FOLDER, FOLDER:USR1 or FOLDER:USR2"),
        ("SEALRING_LIVE", "run", "set it to the absolute path of a directory"),
        ("_SEALRING_REPLAY", "{", "_SEALRING_REPLAY is not JSON"),
    ],
)
def test_observers_refuse_a_bad_setting_before_ranks_meet(name: str, value: str, text: str) -> None:
    def prepare() -> list[Made]:
        return [observe({name: value}) for observe in group_observers.wanted({name: value})]

    with pytest.raises(ConfigurationError, match=re.escape(text)):
        prepare()


def objecting(environ: object) -> Made:
    def made(group: GroupMade) -> None:
        raise ConfigurationError(f"group {group.flight.group} cannot be observed")

    return made


def joins_with_an_observer_that_fails(rank: int, world: int) -> str:
    import torch.distributed as dist

    observers = [f"{__name__}:objecting"] if rank == 1 else []
    try:
        with group_observers.only(*observers):
            dist.init_process_group("sealring")
        dist.barrier()
    except Exception as error:
        return type(error).__name__
    return ""


def test_a_group_that_cannot_be_observed_ends_on_every_rank(workers: Workers) -> None:
    ended = workers.run(joins_with_an_observer_that_fails, world=2, group=False)
    assert ended[1] == "ConfigurationError"
    assert ended[0] in ("GroupClosed", "PeerLost", "GroupEnded")


def test_a_vault_key_of_a_broker_needs_a_provider(no_providers: None) -> None:
    from sealring.vault.keys import released_key

    with pytest.raises(ConfigurationError, match="a data key of a broker's needs one provider"):
        released_key("default/vault/one")


def test_a_ledger_at_the_broker_needs_a_provider(
    no_providers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sealring.vault.ledger import BrokerLedger

    monkeypatch.setenv("SEALRING_BROKER", "https://broker:8443")
    with pytest.raises(ConfigurationError, match="a ledger at the broker needs one provider"):
        BrokerLedger("0" * 32).state()


def test_an_audit_that_names_machines_needs_a_judge(no_providers: None, tmp_path: Path) -> None:
    from sealring.record.audit.claims import read_claims

    (tmp_path / "policy.toml").write_text("")
    (tmp_path / "claims.toml").write_text('version = 1\nmachines = "policy.toml"\n')
    with pytest.raises(ConfigurationError, match="judging evidence needs one provider"):
        read_claims(tmp_path / "claims.toml")
