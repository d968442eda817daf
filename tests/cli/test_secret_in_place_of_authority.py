"""A job under a secret has no authority file, so the commands accept the secret."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cli.test_commands import sealring

SCRIPT = """
import torch, torch.distributed as dist
import sealring
dist.init_process_group()
with sealring.record_run(every=1) as records:
    for step in records.steps(2):
        dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a recorded run of two ranks under a secret, and another secret."""
    folder = tmp_path_factory.mktemp("job")
    for name in ("secret", "other"):
        (folder / name).write_text(secrets.token_hex(32))
        (folder / name).chmod(0o600)
    (folder / "train.py").write_text(SCRIPT)
    done = sealring(
        "run", "-n", "2", "--secret-file", str(folder / "secret"), "--record", str(folder / "run"),
        str(folder / "train.py"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_audit(place: Path) -> None:
    vkey = (place / "run.vkey").read_text().strip()
    audit = ("audit", "check", str(place / "run"), "--policy", vkey)
    done = sealring(*audit, "--authority", str(place / "secret"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "statements of 2 ranks" in done.stdout
    assert "No claims were given" in done.stdout
    assert (place / "secret").read_text() not in done.stdout + done.stderr
    forged = sealring(*audit, "--authority", str(place / "other"))
    assert forged.returncode != 0
    without = sealring(*audit)
    assert without.returncode == 2
    assert "whose workers are believed? Pass --authority FILE" in without.stderr


def test_statement_and_log(place: Path) -> None:
    statement = str(min((place / "run" / "statements").iterdir()))
    verify = ("audit", "verify", statement, "--authority")
    done = sealring(*verify, str(place / "secret"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 of job-")
    assert "log.forged_statement" in sealring(*verify, str(place / "other")).stderr
    log = str(place / "log")
    assert sealring("audit", "init", log, "--log", "example.org/log").returncode == 0
    append = ("audit", "append", log, statement, "--authority")
    assert "log.forged_statement" in sealring(*append, str(place / "other")).stderr
    assert sealring(*append, str(place / "secret")).returncode == 0
