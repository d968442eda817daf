"""A bench run keeps its measurements, however it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.bench import run
from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.table import parse_table, shipped_table
from sealring.errors import WorkerFailed
from sealring.lab.bench.collectives import CollectiveRun, Effort
from sealring.lab.bench.harness import BenchJob, BenchSession, Timings
from sealring.lab.bench.step import StepSetting, Work
from sealring.lab.bench.suite import everything, steps
from sealring.lab.results import read_results


def exchange(size: int) -> CollectiveRun:
    samples = {"plain": Timings((2e-3, 2.1e-3)), "sealed": Timings((1e-3, 1.1e-3))}
    return CollectiveRun(
        "allreduce", "all_reduce", 2, size, "shm", samples, [(size, size), (size, 0)], 0, 3
    )


def job(*sizes: int, then: BaseException | None = None) -> BenchJob:
    def measure(progress: Any) -> Iterator[CollectiveRun]:
        for size in sizes:
            progress(0.5)
            yield exchange(size)
        if then is not None:
            raise then

    return BenchJob("a job", len(sizes) + (then is not None), measure)


def test_a_whole_run_is_complete_and_runs_are_told_apart(tmp_path: Path) -> None:
    told: list[float] = []
    session = BenchSession("sealring bench", tmp_path / "results.json")
    session.run([job(8, 16), job(32)], lambda done, _: told.append(done))
    results = read_results(tmp_path / "results.json")
    assert results.complete
    assert results.stopped is None
    assert [(case.bytes, case.variant, case.run) for case in results.allreduce] == [
        (8, "plain", 0), (8, "sealed", 0), (16, "plain", 1), (16, "sealed", 1),
        (32, "plain", 2), (32, "sealed", 2),
    ]  # fmt: skip
    assert [case.sealed_bytes for case in results.allreduce] == [0, 8, 0, 16, 0, 32]
    assert told == [0, 0.5, 1.5, 2, 2.5]


def test_the_file_says_by_which_table_algorithms_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    tables = []
    for fixed in ({}, {"algorithm": "all_reduce=tree"}):
        monkeypatch.setenv("SEALRING_SETTINGS", json.dumps(fixed))
        BenchSession("sealring bench", path).run([job(8)], lambda *_: None)
        tables.append(parse_table(read_results(path).algorithms, "these"))
    assert tables[0] == shipped_table()
    assert tables[1] == shipped_table().fixed_to({Operation.ALL_REDUCE: Algorithm.TREE})


def test_the_file_is_there_after_each_job(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    seen: list[Any] = []

    def look(_: Any) -> Iterator[CollectiveRun]:
        seen.append(read_results(path))
        yield exchange(64)

    BenchSession("bench", path).run([job(8), BenchJob("looks", 1, look)], lambda *_: None)
    assert [(each.complete, each.stopped) for each in seen] == [
        (False, "it ended after 1 of 2 cases")
    ]
    assert read_results(path).complete


@pytest.mark.parametrize(
    ("stop", "status", "why"),
    [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C after 2 of 3 cases"),
        (signal.SIGTERM, 143, "stopped by SIGTERM after 2 of 3 cases"),
        (signal.SIGHUP, 129, "stopped by SIGHUP after 2 of 3 cases"),
    ],
)
def test_a_user_who_stops_it_gets_what_was_measured(
    stop: Any, status: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = BenchSession("sealring bench", tmp_path / "results.json")

    def measure(_: Any) -> Iterator[CollectiveRun]:
        yield exchange(8)
        yield exchange(16)
        if isinstance(stop, signal.Signals):
            os.kill(os.getpid(), stop)
            signal.pause()
        raise stop

    assert run(session, [BenchJob("stopped", 3, measure)]) == status
    results = read_results(tmp_path / "results.json")
    assert (results.complete, results.stopped) == (False, why)
    assert len(results.allreduce) == 4
    assert f"{why}; they are in" in capsys.readouterr().err.replace("\n", " ")


def test_what_nohup_ignores_does_not_stop_it(tmp_path: Path) -> None:
    def measure(_: Any) -> Iterator[CollectiveRun]:
        os.kill(os.getpid(), signal.SIGHUP)
        yield exchange(8)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert (
            run(BenchSession("sealring bench", tmp_path / "r.json"), [BenchJob("on", 1, measure)])
            is None
        )
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert read_results(tmp_path / "r.json").complete


def test_a_worker_that_fails_loses_nothing_either(tmp_path: Path) -> None:
    session = BenchSession("sealring bench", tmp_path / "results.json")
    with pytest.raises(WorkerFailed, match="out of memory"):
        run(session, [job(8, then=WorkerFailed("out of memory"))])
    assert read_results(tmp_path / "results.json").stopped == "a worker failed after 1 of 2 cases"


def test_what_one_process_computes_by_itself_is_measured_once() -> None:
    settings = tuple(StepSetting("mlp", 4, "fp32", bucket) for bucket in (1.0, 25.0))
    works = [Work(ranks, settings[:ranks], ("compute", "sealed")) for ranks in (2, 4)]
    assert [(each.label, each.count) for each in steps(works)] == [
        ("training mlp, 1 rank", 1),
        ("training mlp, 2 ranks", 2),
        ("training mlp, 4 ranks", 2),
    ]


def test_everything_is_every_part_and_quick_is_less() -> None:
    quick, full = everything(quick=True), everything(quick=False)
    assert (
        list(quick) == list(full) == ["aead", "link", "allreduce", "collectives", "step", "scale"]
    )
    for name in quick:
        assert 0 < cases(quick[name]) < cases(full[name]) or name == "aead"


def cases(jobs: list[BenchJob]) -> int:
    return sum(each.count for each in jobs)


def test_a_block_is_never_empty() -> None:
    assert Effort().calls(1 << 30, 64) == 2
    assert Effort().calls(0, 2) == Effort().most_calls
