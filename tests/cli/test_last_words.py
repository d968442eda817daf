"""The launcher's last line names the worker that failed first."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sealring.cli.run import print_cause
from sealring.core.last_words import LastWords, read_error_files
from tests.cli.test_commands import sealring

SCRIPT = """
import os, signal, subprocess, sys, torch, torch.distributed as dist
CHILD = "import torch; raise ValueError('of a child, which ends no worker')"
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
            "Rank 1 was killed by SIGKILL; often the kernel's out-of-memory killer, which `dmesg` "
            "shows.",
        ),
        (
            "subprocess.run([sys.executable, '-c', CHILD], stderr=subprocess.PIPE); os._exit(3)",
            "Rank 1 ended with exit code 3. What it printed is above, if any.",
        ),
        (
            "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(200_000 * '['); os._exit(3)",
            "Rank 1 ended with exit code 3. What it printed is above, if any.",
        ),
        (
            "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}'); os._exit(3)",
            "Rank 1 ended with exit code 3. What it printed is above, if any.",
        ),
        (
            "os.environ.clear(); raise ValueError('without variables')",
            "ValueError: without variables (rank 1). Its traceback is above.",
        ),
        (
            "raise ValueError('\\x1b[2J' + 10_000_000 * 'x')",
            f"ValueError: ?[2J{9_984 * 'x'}... (rank 1). Its traceback is above.",
        ),
        (
            "raise type('Bad', (Exception,), {'__str__': None})",
            "Bad: <exception str() failed> (rank 1). Its traceback is above.",
        ),
        ("os._exit(3)", "Rank 1 ended with exit code 3. What it printed is above, if any."),
    ],
)
def test_the_last_line_is_the_cause_and_not_what_followed(
    fault: str, last: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault=fault))
    done = sealring("run", "-n", "2", str(script))
    assert done.returncode == 1
    # The number depends on whether the other worker had ended by then, which is chance.
    found = done.stderr.splitlines()[-1]
    for others in ("; 1 more ended with it", " (1 more ended with it)"):
        found = found.replace(others, "")
    assert found.endswith(last)
    assert "group.peer_lost" not in done.stderr  # rank 0 got this error, which adds nothing


def test_what_the_launcher_ended_itself_is_no_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 1 was ended by the launcher while it left; rank 0 lost it and says so."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "0" / "error.json").write_text(written(0, 1.0, follows=True))
    failures = {
        rank: ProcessFailure(rank, 7, code, str(tmp_path / str(rank) / "error.json"))
        for rank, code in ((0, 1), (1, -signal.SIGTERM))
    }
    print_cause(ChildFailedError("train.py", failures))
    assert capsys.readouterr().err == "of rank 0 (rank 0; 1 more ended with it)\n"


def written(rank: int, at: float, **more: Any) -> str:
    info = {
        "py_callstack": "", "timestamp": "1", "time": at, "rank": rank, "failed": rank,
        "follows": False, "printed": False, **more,
    }  # fmt: skip
    return json.dumps({"message": {"message": f"of rank {rank}", "extraInfo": info}})


def test_errors_are_read_in_the_order_of_time_and_unreadable_ones_left_out(tmp_path: Path) -> None:
    texts = {
        "0": written(4, 2.0, follows=True), "1": written(5, 1.0, printed=True), "2": "{",
        "3": json.dumps({"message": "a text of torch's"}),
        "4": written(6, 1.0, time="noon"), "5": written(7, 1.0, failed=[7]), "6": 100_000 * "[",
        "7": written(8, 1.0, failed=1e999),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(text)
    assert read_error_files(str(tmp_path / "2" / "error.json")) == [
        LastWords(5, 5, "of rank 5", 1.0, follows=False, printed=True),
        LastWords(4, 4, "of rank 4", 2.0, follows=True, printed=False),
    ]


CHECKPOINT = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file
dist.init_process_group()
os.chdir(sys.argv[3])
vault = Vault.open("v", key_file("k"))
state = {"weight": torch.zeros(int(sys.argv[2]), 1024)}
if sys.argv[1] == "save":
    dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
else:
    dcp.load(state, storage_reader=CheckpointReader(vault, "run"))
dist.destroy_process_group()
"""


class Job:
    """A script that saves to a vault and loads from it, and the secret of its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(CHECKPOINT)
        (folder / "secret").write_text(secrets.token_hex(32))
        (folder / "secret").chmod(0o600)
        made = sealring("vault", "init", str(folder / "v"), "--key", str(folder / "k"))
        assert made.returncode == 0, made.stderr

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        secret, script = self.folder / "secret", self.folder / "train.py"
        given = (str(script), *arguments, str(self.folder))
        return sealring("run", "-n", "2", "--secret-file", str(secret), *given)


def test_a_tampered_checkpoint_is_one_named_error_and_the_last(tmp_path: Path) -> None:
    """On each rank torch raises a CheckpointException with the errors of all ranks."""
    job = Job(tmp_path)
    assert job.run("save", "64").returncode == 0
    (part,) = (tmp_path / "v").rglob("rank-00000")
    content = bytearray(part.read_bytes())
    content[100_000] ^= 1
    part.write_bytes(content)
    done = job.run("load", "64")
    assert done.returncode == 1
    *_, script, last = done.stderr.splitlines()
    assert script.strip().startswith("dcp.load(")
    assert last.startswith(
        "vault.tampered_chunk: part rank-00000 of 'run' version 1: chunk 6 of 17 "
    )
    assert "Restore the file from a copy (rank 0" in last
    assert done.stderr.count("vault.tampered_chunk") == 1
    assert "Traceback" not in done.stderr
    assert "CheckpointException" not in done.stderr


def test_a_full_disk_in_a_save_is_one_named_error_and_the_last(small_disk: Path) -> None:
    job = Job(small_disk)
    done = job.run("save", str(4 << 10))  # 16 MiB
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("configuration.disk_full: v/objects/")
    assert "cannot be written: No space left on device" in last
    assert "Free some space" in last
    assert "Traceback" not in done.stderr
    assert job.run("save", "64").returncode == 0  # the save removes what the failed one left
