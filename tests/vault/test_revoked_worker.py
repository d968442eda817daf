"""A broker revokes a worker in the middle of a save, and the worker goes on writing."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from sealring.core.identity.names import WorkerName
from sealring.errors import NoLongerAdmitted, SealringError
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, released_key
from tests.attest.broker.local import JOB, running
from tests.vault.test_through_a_broker import RESOURCE, granted
from tests.workers import Workers

PATIENCE = timedelta(seconds=60)


def wait_for(what: Any) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def state(step: int, rank: int) -> dict[str, Any]:
    return {f"weight {rank}": torch.full((50_000,), float(step)), "step": step}


def save(vault: Vault, step: int, rank: int) -> None:
    dcp.save(state(step, rank), storage_writer=CheckpointWriter(vault, "run"))


def is_revoked_while_it_saves(
    rank: int, world: int, folder: str, revoked: int, helper: bool, background: bool
) -> str:
    from sealring.attest.broker import this_worker

    dist.init_process_group("sealring", timeout=PATIENCE)
    vault = Vault.open(Path(folder), released_key(RESOURCE))
    save(vault, 1, rank)
    writer = CheckpointWriter(vault, "run", helper=helper)

    def is_out() -> bool:
        try:
            this_worker().renewed_credentials()
        except SealringError:
            return True
        return False

    if rank == revoked:
        real = writer.seal

        def seal(*args: Any) -> Any:
            Path(folder).with_name("writing").touch()
            wait_for(is_out)
            sealed = real(*args)
            Path(folder).with_name("written").touch()
            return sealed

        writer.seal = seal  # type: ignore[assignment]
    try:
        if background:
            group = dist.new_group(backend="sealring", timeout=PATIENCE)
            pending: Any = dcp.async_save(
                state(2, rank), storage_writer=writer, process_group=group
            )
            pending.result()
        else:
            dcp.save(state(2, rank), storage_writer=writer)
    except SealringError as problem:
        if rank == revoked:
            # Out is out: it gets nothing more of the vault where the broker keeps the ledger.
            with pytest.raises(SealringError) as refused:
                vault.refresh()
            return f"{problem.code} {refused.value.code}"
        return problem.code
    return "saved"


def goes_on(rank: int, world: int, folder: str) -> list[float]:
    dist.init_process_group("sealring", timeout=PATIENCE)
    vault = Vault.open(Path(folder), released_key(RESOURCE))
    found = []
    for step in (None, 3):
        if step is not None:
            save(vault, step, rank)
        loaded = state(0, rank)
        dcp.load(loaded, storage_reader=CheckpointReader(vault, "run"))
        found.append(float(loaded[f"weight {rank}"].mean()))
    return found


@pytest.mark.parametrize("revoked", [0, 1])
@pytest.mark.parametrize(
    ("helper", "background"), [(False, False), (True, True)], ids=["here", "background"]
)
@pytest.mark.threat("V36")
def test_the_checkpoint_before_is_whole_and_the_next_is_saved(
    revoked: int, helper: bool, background: bool, workers: Workers, tmp_path: Path
) -> None:
    place, _ = granted(tmp_path)
    place.minutes = 0.2
    place.write_policy(f'[[resources]]\npath = "{RESOURCE}"\n', top="rejoins = 3")
    folder = tmp_path / "vault"
    with running(place) as broker:

        def revoke() -> None:
            wait_for((tmp_path / "writing").exists)
            broker.revoke(revoked)

        revoking = threading.Thread(target=revoke)
        revoking.start()
        environment = place.environment(broker.port) | {"SEALRING_VAULT_LEDGER": "broker"}
        results = workers.run(
            is_revoked_while_it_saves, str(folder), revoked, helper, background,
            world=3, group=False, env=environment,
        )  # fmt: skip
        revoking.join()
        expected = [NoLongerAdmitted.code] * 3
        expected[revoked] += " broker.worker_revoked"
        assert results == expected
        assert (tmp_path / "written").exists()
        name = WorkerName(JOB, revoked)
        broker.decide(lambda ledger, view: ledger.release(view, time.time(), name))
        again = workers.run(goes_on, str(folder), world=2, group=False, env=environment)
    assert again == [[1.0, 3.0]] * 2
    owner = Vault.open(folder, keys.key_file(tmp_path / "owner"))
    problems: list[Any] = []
    # What the save left that failed was removed by the next, which may then have its number.
    assert len(list(owner.stored(problems))) == 2
    assert not problems
