"""A broker killed (-9) between any two steps gives no rank twice and loses no revocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.threat("B6")
def test_killed_between_any_two_steps_it_gives_no_rank_twice(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attest.broker.crashing", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Three steps of the start, two of auth, five of attest, five of the certificate. All are fatal.
    assert found["steps"] == 15
    # Killed before the commit, before its end, after it: only a committed revocation is kept.
    assert found["revoked"] == [False, False, True]
