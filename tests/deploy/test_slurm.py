"""The batch scripts of deploy/slurm, submitted to a real Slurm of two nodes."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.namespaces import end
from tests.deploy.sealed_step import COUNT
from tests.deploy.slurm_cluster import NODES, Cluster, needs_slurm, processes, slurm

pytestmark = needs_slurm

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
SEALRING = Path(sys.executable).parent / "sealring"
STEP = ROOT / "tests" / "deploy" / "sealed_step.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        for script in SCRIPTS.glob("*.sbatch"):
            shutil.copy(script, started.shared)
        yield started


@contextmanager
def sniffing(cluster: Cluster, file: Path) -> Iterator[None]:
    """On the first node's link, which everything passes that comes to it or leaves it."""
    sniffer = ROOT / "tests" / "deploy" / "sniffer.py"
    process = cluster.machines["head"].start(f"exec python {sniffer} node0 {file}")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield
    finally:
        end(process)


def results(cluster: Cluster, job: str, folder: Path) -> list[dict[str, Any]]:
    """What both ranks wrote, once they have."""
    files = [folder / "0.json", folder / "1.json"]
    ends = time.monotonic() + 100
    while not all(file.exists() for file in files):
        shown = cluster.wait_until(job, "PENDING", "RUNNING", "FAILED", "COMPLETED")
        failed = "JobState=FAILED" in shown or time.monotonic() > ends
        assert not failed, shown + cluster.logs()
        time.sleep(0.1)
    return [json.loads(file.read_text()) for file in files]


def sealed_result(rank: int) -> dict[str, Any]:
    return {
        "rank": rank, "world": 2, "host": f"node{rank}",
        "groups": ["SealedProcessGroup"], "right": True,
    }  # fmt: skip


@pytest.mark.threat("S1")
def test_a_job_with_a_secret_is_sealed_and_slurm_never_learns_the_secret(
    cluster: Cluster, tmp_path: Path
) -> None:
    secret = secrets.token_hex(32)
    for node in NODES:  # as an operator copies it, over ssh
        file = cluster.folder_of(node) / "job.secret"
        file.touch(0o600)
        file.write_text(secret)
    heard = tmp_path / "heard"
    with sniffing(cluster, heard):
        job = cluster.submit(
            f"train.sbatch {SEALRING} {cluster.local}/job.secret {STEP} {tmp_path}"
        )
        found = results(cluster, job, tmp_path)
        shown = cluster.on_head(f"scontrol show job --details {job}")
        script = cluster.on_head(f"scontrol write batch_script {job} -")
        exposed = {process.name for process in processes() if shows(process, secret)}
        workers = {process.name for process in processes() if shows(process, str(tmp_path))}
        stored = [file for file in slurm_files(cluster) if secret.encode() in file.read_bytes()]
        (tmp_path / "go").touch()
        cluster.wait_until(job, "COMPLETED")
    assert found == [sealed_result(0), sealed_result(1)]
    assert len(workers) >= 4, "two launchers and two workers were looked at"
    assert not exposed
    assert secret not in shown + script
    assert not stored
    passed = heard.read_bytes()
    assert len(passed) > 8 * COUNT, "the tensor passed this link"
    assert b"srun --export=ALL" in passed, "Slurm sent the batch script, and it was heard"
    assert b"TENSOR!!" not in passed
    assert secret.encode() not in passed
    assert bytes.fromhex(secret) not in passed


def shows(process: Path, text: str) -> bool:
    """Whether it is in the process's environment or command line."""
    try:
        content = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    except OSError:
        return False  # it has ended
    return text.encode() in content


def slurm_files(cluster: Cluster) -> Iterator[Path]:
    for name in ("head", *NODES):
        for folder in ("state", "spool"):
            files = (cluster.folder_of(name) / folder).rglob("*")
            yield from (file for file in files if file.is_file())


@pytest.mark.threat("S2")
def test_a_job_with_certificates_is_sealed_and_its_keys_stay_on_their_machines(
    cluster: Cluster, tmp_path: Path
) -> None:
    exchange, ca = tmp_path / "exchange", tmp_path / "ca"
    exchange.mkdir(0o700)
    subprocess.run([SEALRING, "ca", "init", ca], check=True, capture_output=True)
    job = cluster.submit(
        f"train-certificates.sbatch {SEALRING} {ca}/authority.pem {exchange} 1 {STEP} {tmp_path}"
    )
    subprocess.run(
        [SCRIPTS / "issue.sh", SEALRING, ca, exchange, job, "2"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    found = results(cluster, job, tmp_path)
    keys = {
        node: cluster.machines[node].run(f"ls /dev/shm/sealring-{job}/*.key").split()
        for node in NODES
    }
    (tmp_path / "go").touch()
    cluster.wait_until(job, "COMPLETED")
    assert found == [sealed_result(0), sealed_result(1)]
    assert keys == {
        node: [f"/dev/shm/sealring-{job}/sealring-{job}-rank-{rank}.key"]
        for rank, node in enumerate(NODES)
    }
    assert not [file for file in exchange.iterdir() if b"PRIVATE" in file.read_bytes()]
    for node in NODES:
        assert not cluster.machines[node].run("ls -A /dev/shm").strip()


def test_another_secret_on_one_node_ends_the_job_with_the_error_of_both(
    cluster: Cluster, tmp_path: Path
) -> None:
    for node in NODES:
        file = cluster.folder_of(node) / "other.secret"
        file.touch(0o600)
        file.write_text(secrets.token_hex(32))
    job = cluster.submit(f"train.sbatch {SEALRING} {cluster.local}/other.secret {STEP} {tmp_path}")
    cluster.wait_until(job, "FAILED")
    said = (cluster.shared / f"slurm-{job}.out").read_text()
    assert said.count("handshake.unknown_authority: ") == 2
    assert not list(tmp_path.iterdir())
