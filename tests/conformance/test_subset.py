"""torch's own tests of a backend, as many as CI has time for. `make conformance` runs all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conformance.run import ROOT
from tests.conformance.subset import SUBSET


@pytest.mark.timeout(900)
def test_sealring_passes_torchs_own_tests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance", "--subset", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert report["complaints"] == []
    assert done.returncode == 0
    assert {case["case"] for case in report["cases"]} == SUBSET
    assert (report["passed"], report["failed"], report["skipped"]) == (len(SUBSET) - 1, 0, 1)
