"""Workers fail because one of them did: the launcher's last line names that one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sealring.cli.run import _print_cause
from sealring.last_words import LastWords, told_beside
from tests.cli.test_commands import sealring

SCRIPT = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 1:
    {fault}
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        (
            "raise ValueError('of the script')",
            "ValueError: of the script (rank 1). Its traceback is above.",
        ),
        (
            "dist.new_group(backend='mpi')",
            "Name the backend sealring there, or run the job without SEALRING_ONLY. (rank 1)",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "Rank 1 ended with exit code -9. Its own output is above.",
        ),
    ],
)
def test_the_last_line_is_the_cause_and_not_what_followed(
    fault: str, last: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault=fault))
    done = sealring("run", "-n", "2", str(script))
    assert done.returncode == 1
    # Whether the other one had ended by then is chance.
    assert done.stderr.splitlines()[-1].replace("; 1 more ended with it", "").endswith(last)
    assert "PeerLost" not in done.stderr  # rank 0 got it, and it says nothing new


def test_what_the_launcher_ended_itself_is_no_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 1 left, and was ended while it did; rank 0 lost it and says so."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "0" / "error.json").write_text(written(0, 1.0, follows=True))
    failures = {
        rank: ProcessFailure(rank, 7, code, str(tmp_path / str(rank) / "error.json"))
        for rank, code in ((0, 1), (1, -signal.SIGTERM))
    }
    _print_cause(ChildFailedError("train.py", failures))
    assert capsys.readouterr().err == "of rank 0 (rank 0; 1 more ended with it)\n"


def written(rank: int, time: float, **more: Any) -> str:
    info = {
        "py_callstack": "", "timestamp": "1", "time": time, "rank": rank, "follows": False,
        "printed": False, **more,
    }  # fmt: skip
    return json.dumps({"message": {"message": f"of rank {rank}", "extraInfo": info}})


def test_errors_are_read_in_the_order_of_time_and_unreadable_ones_left_out(tmp_path: Path) -> None:
    texts = {
        "0": written(4, 2.0, follows=True), "1": written(5, 1.0, printed=True), "2": "{",
        "3": json.dumps({"message": "a text of torch's"}),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(text)
    assert told_beside(str(tmp_path / "2" / "error.json")) == [
        LastWords(5, "of rank 5", 1.0, follows=False, printed=True),
        LastWords(4, "of rank 4", 2.0, follows=True, printed=False),
    ]
