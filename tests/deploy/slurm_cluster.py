"""A Slurm cluster of three machines, each in namespaces of its own.

head 10.78.0.1 (a bridge): slurmctld ---- node0 10.78.0.10: slurmd
                                     ---- node1 10.78.0.11: slurmd

Each machine runs a munged of its own, as in a real cluster. All files are below one folder; the
part that belongs to one machine is mounted at the same path on each of them (Cluster.local).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.namespaces import Machine, end, machines

ADDRESSES = {"head": "10.78.0.1", "node0": "10.78.0.10", "node1": "10.78.0.11"}
NODES = ("node0", "node1")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "mungekey")

needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason="Slurm is not installed (make system-deps)"
)

CONFIGURATION = """
ClusterName=sealring
SlurmctldHost=head(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={local}/munge.socket
CredType=cred/munge
StateSaveLocation={local}/state
SlurmdSpoolDir={local}/spool
SlurmctldPidFile={local}/slurmctld.pid
SlurmdPidFile={local}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=sched_min_interval=1000,batch_sched_delay=0
NodeName=node[0-1] CPUs=1 RealMemory=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Cluster:
    shared: Path
    """A folder that all machines see, as a cluster's shared file system."""
    local: Path
    """Where each machine sees a folder of its own."""
    machines: dict[str, Machine]

    def on_head(self, command: str) -> str:
        return self.machines["head"].run(command)

    def folder_of(self, node: str) -> Path:
        """This node's `local`, as the test sees it."""
        return self.machines[node].folder / "local"

    def submit(self, command: str) -> str:
        """Returns the job's number."""
        return self.on_head(f"cd {self.shared} && sbatch --parsable {command}").strip()

    def wait_until(self, job: str, *states: str, seconds: float = 100) -> str:
        """Returns what `scontrol show job` says once the job is in one of the states."""
        ends = time.monotonic() + seconds
        while True:
            shown = self.on_head(f"scontrol show job {job}")
            if any(f"JobState={state} " in shown for state in states):
                return shown
            assert time.monotonic() < ends, shown + self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        files = [*self.shared.glob("*.out"), *self.shared.parent.glob("*/local/*.log")]
        return "".join(f"\n== {file}\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    shared, local = folder / "shared", folder / "local"
    shared.mkdir()
    local.mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(local=local))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    own = (
        f"mkdir -p local/state local/spool && mount --bind local {local}"
        " && mount -t tmpfs tmpfs /dev/shm"
    )
    with machines(folder, ADDRESSES, prepare=own) as made, ExitStack() as stack:
        for machine in made.values():
            machine.environ |= {"SLURM_CONF": str(configuration)}
        for name, machine in made.items():
            service = "slurmctld" if name == "head" else "slurmd"
            files = " ".join(
                f"--{what}-file={local}/munged.{what}" for what in ("pid", "log", "seed")
            )
            _start(
                stack, machine,
                f"munged --foreground --force --num-threads=1 --key-file={key} {files} "
                f"--socket={local}/munge.socket 2>{local}/munged.err",
            )  # fmt: skip
            _start(
                stack, machine,
                f"for i in $(seq 200); do test -S {local}/munge.socket && break; sleep 0.05; done; "
                f"exec {service} -D -L {local}/{service}.log",
            )  # fmt: skip
        cluster = Cluster(shared, local, made)
        stack.callback(_end_jobs, cluster)
        _wait_for_nodes(cluster)
        yield cluster


def _start(stack: ExitStack, machine: Machine, command: str) -> None:
    process = subprocess.Popen(
        machine.inside(command), env=machine.environ, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(end, process)


def _wait_for_nodes(cluster: Cluster) -> None:
    ends = time.monotonic() + 60
    while True:
        said = cluster.on_head("sinfo --noheader --format='%T %D' 2>&1 || true")
        if said.split() == ["idle", "2"]:
            return
        assert time.monotonic() < ends, said + cluster.logs()
        time.sleep(0.2)


def _end_jobs(cluster: Cluster) -> None:
    """Cancels what a failed test has left, then ends the machines' processes by their numbers."""
    cluster.on_head("scancel --user=root || true")
    ends = time.monotonic() + 20
    while cluster.on_head("squeue --noheader || true").strip() and time.monotonic() < ends:
        time.sleep(0.2)
    networks = {
        os.readlink(f"/proc/{each.holder.pid}/ns/net") for each in cluster.machines.values()
    }
    for process in processes():
        with suppress(OSError):
            cmdline = (process / "cmdline").read_bytes()
            if os.readlink(process / "ns/net") in networks and b"slurmstepd" in cmdline:
                os.kill(int(process.name), signal.SIGKILL)


def processes() -> Iterator[Path]:
    yield from (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())
