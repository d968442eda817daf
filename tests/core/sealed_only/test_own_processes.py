"""Processes that sealring itself starts work in sealed-only mode as they do without it."""

from __future__ import annotations

import os
import subprocess
import sys

TESTS = (
    "tests/vault/test_checkpoints.py::test_what_was_saved_is_loaded[True]",
    "tests/record/recording/test_replay.py::test_a_script_that_prints_without_end_is_ended",
)


def test_the_vaults_helper_and_a_replays_script_start_in_sealed_only_mode() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS],
        env={**os.environ, "SEALRING_ONLY": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{len(TESTS)} passed" in done.stdout
