"""What `sealring top` shows of real groups."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sealring.cli import app, top
from sealring.errors import ConfigurationError
from sealring.observe.directory import chosen_directory
from sealring.observe.status import (
    Count,
    ErrorStatus,
    GroupStatus,
    PeerStatus,
    Reading,
    WorkerStatus,
    read_all,
)
from tests.observe.scenes import private
from tests.workers import Workers


def reduce(rank: int, world: int) -> int:
    dist.all_reduce(torch.ones(50_000))
    group: Any = dist.group.WORLD
    return int(group.account()["sealed_bytes"])


def test_top_shows_the_workers_of_a_job(workers: Workers, tmp_path: Path) -> None:
    live = tmp_path / "live"
    env = {"SEALRING_LIVE": str(live), "SEALRING_JOB": "shown", "SEALRING_TRANSPORT": "tcp"}
    sealed = workers.run(reduce, world=2, env=env)
    options = ["top", "--interval", "0.3"]
    where = {"SEALRING_LIVE": str(live)}
    done = CliRunner().invoke(app, [*options, "--json"], env=where)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["stale"], document["silent"]) == ([], {})
    for rank, worker in enumerate(document["workers"]):
        assert (worker["job"], worker["rank"], worker["size"]) == ("shown", rank, 2)
        assert worker["pid"] == workers.processes[rank].pid
        assert worker["host"] == socket.gethostname()
        assert worker["identity"] == "secret"
        assert worker["certificate_ends_s"] > worker["time_s"]
        assert worker["sealed_bytes"] >= sealed[rank]  # earlier tests' groups count too
        assert worker["sealed_bytes_per_s"] == 0.0
        (group,) = [one for one in worker["groups"] if one["state"] == "open"]
        assert group["sealed_bytes"] == sealed[rank]
        assert [(p["rank"], p["transport"]) for p in group["peers"]] == [(1 - rank, "tcp")]
        counts = {
            (one["metric"], one["group"], one["label"]): one["value"] for one in worker["counts"]
        }
        assert counts["collectives", group["name"], "all_reduce"] >= 1  # earlier groups count too
    assert len(document["workers"]) == 2
    table = CliRunner().invoke(app, options, env={"COLUMNS": "80", **where})
    assert "job shown: 2 of 2 ranks are on this machine" in table.stdout
    none = CliRunner().invoke(app, [*options, "--json", "--job", "another"], env=where)
    assert json.loads(none.stdout)["workers"] == []


def test_no_live_view_where_it_is_switched_off(workers: Workers) -> None:
    env = {"SEALRING_LIVE": "0", "SEALRING_JOB": "hidden"}
    workers.run(reduce, world=2, env=env)
    place = chosen_directory({})
    assert place is not None
    shown = read_all(WorkerStatus, place).answers
    assert "hidden" not in {each.job for each in shown}


def test_a_relative_directory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        chosen_directory({"SEALRING_LIVE": "live"})


def worker(rank: int, sealed: int, at_s: float, *, error: str | None = None) -> WorkerStatus:
    group = GroupStatus(
        id="00ff", name="dp\x1b[2J", rank=rank, size=4, state="failed" if error else "open",
        age_s=7300.0, sealed_bytes=sealed, opened_bytes=sealed, gpu_wire="peer",
        peers=[PeerStatus(3, "host-b", "tcp", 12.5)],
        last_error=ErrorStatus(error, 3.0) if error else None,
    )  # fmt: skip
    return WorkerStatus(
        job="train", rank=rank, size=4, host="host-a", pid=100 + rank, version="0", time_s=1e9,
        monotonic_ns=int(at_s * 1e9), identity="broker", certificate_ends_s=1e9 + 5400,
        sealed_only=True, groups_open=1, groups=[group],
        counts=[Count(f"{what}_bytes", "dp", "", sealed) for what in ("sealed", "opened")],
    )  # fmt: skip


def test_a_screen_of_eighty_columns(tmp_path: Path) -> None:
    from rich.console import Console

    before = Reading([worker(0, 0, 1.0), worker(1, 0, 1.0)])
    after = Reading(
        [worker(0, 3 << 30, 3.0), worker(1, 0, 3.0, error="group.peer_lost: rank 3 left")]
    )
    rates = top.rates_between(before, after)
    assert rates == {("host-a", 100): (1.5 * 2**30,) * 2, ("host-a", 101): (0.0, 0.0)}
    narrow = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    narrow.print(top.screen(after, rates, tmp_path))
    narrow.file.close()
    text = narrow.export_text()
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[0] == "job train: 2 of 4 ranks are on this machine; others on host-b"
    for words in ("1.5 GiB/s", "90 min left", "peer", "rank 3: 12 s (tcp)", "2 h"):
        assert words in text, text
    assert "rank 1, 3.0 s ago: group.peer_lost: rank 3 left" in text


def test_a_socket_that_does_not_answer_as_a_worker_is_named(tmp_path: Path) -> None:
    folder = private(tmp_path / "live")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "1-a.sock"))
        dead.listen()
    reading = read_all(WorkerStatus, folder)
    assert (reading.answers, reading.stale, reading.silent) == ([], ["1-a.sock"], {})


def test_a_directory_that_is_not_there_has_no_workers(tmp_path: Path) -> None:
    assert read_all(WorkerStatus, tmp_path / "none").answers == []


def test_a_view_that_no_terminal_shows_is_printed_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["top"], env={"SEALRING_LIVE": str(tmp_path)})
    assert done.exit_code == 0
    assert done.stdout.startswith("No worker answers in")
    assert "q ends this view" not in done.stdout


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_the_view_ends_by_a_key_and_leaves_the_terminal_as_it_was(
    key: bytes, tmp_path: Path
) -> None:
    """It runs in a terminal of its own, and is ended with `q` and with Ctrl-C."""
    place = tmp_path / "live"
    place.mkdir(mode=0o700)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [Path(sys.executable).parent / "sealring", "top", "--interval", "1"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm", "SEALRING_LIVE": str(place)},
    )  # fmt: skip
    try:
        shown = b""
        while b"No worker answers" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, key)
        assert process.wait(25) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
