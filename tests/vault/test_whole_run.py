"""A private run, from sealed data to a resumed job, that leaves no plaintext anywhere.

Workers with a TPM in software get the vault's key from a broker, train on four ranks, save, and are
killed. Three new ones go on. The job runs in namespaces of its own, in which it can write to /tmp
and /dev/shm alone, and all that passes its network is captured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attest.evidence import swtpm
from tests.vault.plaintext import RUN, Plaintext
from tests.vault.whole_run_job import BATCH

ROOT = Path(__file__).parents[2]
PREPARE = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$STAGE"
for root in $KEPT; do  # what lies under /tmp and is needed to run
    case $root in /tmp/*) mkdir -p "$STAGE/${root#/tmp/}"
        mount --bind "$root" "$STAGE/${root#/tmp/}"
        mount -o remount,bind,ro "$STAGE/${root#/tmp/}" ;; esac
done
mkdir -p "$STAGE/job/outside"
mount -t tmpfs tmpfs "$STAGE/job/outside"
mount --move "$STAGE" /tmp
mount -t tmpfs tmpfs /dev/shm
mount -o remount,bind,ro /
ip link set lo up
for place in / $KEPT; do
    if [ -w "$place" ]; then echo "$place can be written" >&2; exit 3; fi
done
exec python -m tests.vault.whole_run /tmp/job
"""

pytestmark = [swtpm.needs_swtpm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("making namespaces needs root, iproute2 and util-linux")
    kept = {str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "HOME": "/tmp/job", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "STAGE": str(tmp_path_factory.mktemp("stage")), "KEPT": " ".join(sorted(kept)),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
         "bash", "-euo", "pipefail", "-c", PREPARE],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_state_is_bit_identical_on_another_world(report: dict[str, Any]) -> None:
    assert len(set(report["saved"])) == 1
    assert len(report["saved"]) == 4
    assert report["loaded"] == [report["saved"][:3]] * 2


def test_the_losses_are_those_of_a_resume_from_plain_storage(report: dict[str, Any]) -> None:
    sealed, plain = report["losses"]
    assert sealed == plain  # to the last bit
    assert len({loss for rank in sealed for loss in rank}) == 9  # three ranks, three steps


def test_each_sample_comes_once_and_in_one_order(report: dict[str, Any]) -> None:
    saved = 3 * BATCH  # samples of each rank; those behind the checkpoint were lost with the job
    seen = [
        ranks[rank][number]
        for ranks, count in (
            (report["samples"]["before"], saved),
            (report["samples"]["after"], len(report["samples"]["after"][0])),
        )
        for number in range(count)
        for rank in range(len(ranks))
    ]
    assert len(set(seen)) == len(seen) == 42
    assert seen == report["order"]


@pytest.mark.threat("V44")
def test_no_plaintext_is_left_or_sent(report: dict[str, Any]) -> None:
    places = report["places"]
    assert {name: one["found"] for name, one in places.items()} == {
        "disk": [], "shared memory": [], "memory files": [], "network": [],
    }  # fmt: skip
    # Something was there to be searched. sealring uses files in memory, and nothing in /dev/shm.
    assert places["disk"]["bytes"] > 200_000
    assert places["memory files"]["bytes"] > 100_000
    assert places["network"]["bytes"] > 1_000_000


@pytest.mark.threat("V44")
def test_the_search_finds_plaintext_where_there_is_some(report: dict[str, Any]) -> None:
    for name, (runs, left_out) in report["runs"].items():
        assert runs > 10 * left_out, name  # zeros, of weights that are not used
    assert {what for what, _ in report["outside"]["found"]} == {"data", "weights"}
    for place, one in report["control"].items():
        assert {what for what, _ in one["found"]} == {"data", "weights"}, place


def test_the_search_finds_a_run_at_any_offset() -> None:
    secret = bytes(range(40, 100))
    search = Plaintext([secret])
    assert (search.runs, search.left_out) == (len(secret) - RUN + 1, 0)
    for start in (0, 1, 7, len(secret) - RUN):
        for before in (0, 3, (1 << 18) - 8, 1 << 18):
            found = bytes(before) + secret[start : start + RUN] + bytes(5)
            assert search.find(found) == before
            assert search.find(found[: before + RUN - 1]) is None
    assert Plaintext([secret + bytes(100)]).find(bytes(1000)) is None
