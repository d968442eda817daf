"""Saves and loads that overlap, planners that change tensors, and classes that hold tensors."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.testing._internal.two_tensor import TwoTensor

from sealring.cli import run
from sealring.errors import Unsupported
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, files
from tests.vault.test_checkpoints import refused
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


def loaded(vault: Vault, name: str) -> torch.Tensor:
    state = {"weight": torch.zeros(3)}
    dcp.load(state, storage_reader=CheckpointReader(vault, name))
    return state["weight"]


class Meeting(DefaultSavePlanner):
    """Waits before it gives tensors, until the other save is there too."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__()
        self._both = both

    def resolve_data(self, write_item: Any) -> Any:
        self._both.wait(60)
        return super().resolve_data(write_item)


def test_one_writer_saves_twice_at_once(vault: Vault) -> None:
    """As two calls of `dcp.async_save` do, of which the second does not wait for the first."""
    writer = CheckpointWriter(vault, "run")
    both = threading.Barrier(2)
    failed: list[BaseException] = []

    def save(name: str, value: float) -> None:
        try:
            dcp.save(
                {"weight": torch.full((3,), value)},
                checkpoint_id=name,
                storage_writer=writer,
                planner=Meeting(both),
            )
        except BaseException as problem:
            failed.append(problem)

    names = {"one": 1.0, "two": 2.0}
    threads = [threading.Thread(target=save, args=one) for one in names.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for name, value in names.items():
        assert torch.equal(loaded(vault, name), torch.full((3,), value))
        assert vault.find(name).manifest.object_version == 1


class SecondLoad(DefaultLoadPlanner):
    """Loads something else by the same reader, when the plan of this load is made."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        super().__init__()
        self._reader, self._name = reader, name

    def finish_plan(self, central_plan: Any) -> Any:
        other = {"weight": torch.zeros(3)}
        dcp.load(other, checkpoint_id=self._name, storage_reader=self._reader)
        return super().finish_plan(central_plan)


def test_one_reader_does_not_mix_two_loads(vault: Vault) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        state = {"weight": torch.full((3,), value)}
        dcp.save(state, storage_writer=CheckpointWriter(vault, name))
    reader = CheckpointReader(vault, "one")
    state = {"weight": torch.zeros(3)}
    refused(
        lambda: dcp.load(state, storage_reader=reader, planner=SecondLoad(reader, "two")),
        Unsupported,
        "began another load",
    )
    assert torch.equal(state["weight"], torch.zeros(3))


class Gives(DefaultSavePlanner):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        return self._tensor


@pytest.mark.parametrize(
    "given",
    [torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1), torch.zeros(2), torch.zeros(3).half()],
    ids=["type", "rank", "size", "smaller type"],
)
def test_a_planner_that_gives_other_tensors_than_it_planned(
    given: torch.Tensor, vault: Vault
) -> None:
    """Bytes of another type would be read as the planned one."""
    refused(
        lambda: dcp.save(
            {"weight": torch.ones(3)},
            storage_writer=CheckpointWriter(vault, "run"),
            planner=Gives(given),
        ),
        Unsupported,
        "weight is planned as torch.float32 of [3]",
    )


class Half(DefaultSavePlanner):
    """Torch's own example of a planner: it changes the plan and the tensor."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            assert item.tensor_data is not None
            item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        given = super().resolve_data(write_item)
        assert isinstance(given, torch.Tensor)
        return given.to(torch.float16)


def test_a_planner_that_changes_the_plan_too(vault: Vault) -> None:
    weight = torch.tensor([1 / 3, 2.0, 3.0])
    writer = CheckpointWriter(vault, "run")
    dcp.save({"weight": weight}, storage_writer=writer, planner=Half())
    assert torch.equal(loaded(vault, "run"), weight.half().float())


class GivesToLoad(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(2, 3)


def test_a_load_planner_that_gives_another_shape(vault: Vault) -> None:
    dcp.save({"weight": torch.ones(3, 2)}, storage_writer=CheckpointWriter(vault, "run"))
    refused(
        lambda: dcp.load(
            {"weight": torch.zeros(3, 2)},
            storage_reader=CheckpointReader(vault, "run"),
            planner=GivesToLoad(),
        ),
        Unsupported,
        "weight is planned as [3, 2], and the planner gave [2, 3]",
    )


def test_tensors_that_hold_other_tensors(vault: Vault) -> None:
    held = TwoTensor(torch.ones(3), torch.zeros(3))
    refused(
        lambda: dcp.save({"weight": held}, storage_writer=CheckpointWriter(vault, "run")),
        Unsupported,
        "weight is a TwoTensor, which holds other tensors",
    )
    # To fill one is a copy, as with torch's own storage.
    dcp.save({"weight": torch.arange(3.0)}, storage_writer=CheckpointWriter(vault, "run"))
    state: dict[str, Any] = {"weight": TwoTensor(torch.zeros(3), torch.zeros(3))}
    dcp.load(state, storage_reader=CheckpointReader(vault, "run"))
    assert torch.equal(state["weight"].a, torch.arange(3.0))
    assert torch.equal(state["weight"].b, torch.arange(3.0))


def test_a_name_that_is_not_unicode(vault: Vault) -> None:
    refused(
        lambda: dcp.save({"\ud800": 1}, storage_writer=CheckpointWriter(vault, "run")),
        Unsupported,
        "is not Unicode",
    )


def test_a_wait_before_the_thread_that_frees_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that saves may wait then; a thread cannot be joined before its start."""
    start, waited = threading.Thread.start, threading.Event()

    def wait() -> None:
        files.wait_until_freed()
        waited.set()

    def late(thread: threading.Thread) -> None:
        if thread.name == "sealring-free":
            monkeypatch.setattr(threading.Thread, "start", start)
            other = threading.Thread(target=wait)
            other.start()
            assert not waited.is_set()
            start(thread)
            other.join(60)
        else:
            start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with files.freed_later(directory):
            pass
    finally:
        os.close(directory)
    assert waited.is_set()


def test_a_save_under_a_secret_that_is_gone_after_the_run(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`sealring run` makes one if it is given none, and no later run has it."""
    for name in ("SEALRING_SECRET", "SEALRING_SECRET_FILE", "SEALRING_CERTIFICATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in run.identity_environment(1, None).items():
        monkeypatch.setenv(name, value)
    writer = CheckpointWriter(vault, "run")
    for _ in range(2):
        dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    told = [one for one in caplog.messages if "no later run can load them" in one]
    assert len(told) == 1
    assert torch.equal(loaded(vault, "run"), torch.ones(3))  # in the same run


def test_a_save_under_a_secret_of_the_user_does_not_warn(
    vault: Vault, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.identity_environment(1, None) == {}
    dcp.save({"weight": torch.ones(3)}, storage_writer=CheckpointWriter(vault, "run"))
    assert not [one for one in caplog.messages if "no later run" in one]
