"""Runs a world of worker processes on this machine, for measurements and the demo.

Each worker gets the environment that torchrun would give it, and as identity a job secret that
exists only in these processes' memory. Its tensors are on the CPU, or on this machine's GPUs, which
are assigned to ranks in turn.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sealring.errors import ConfigurationError, PeerLost, PeerUnreachable, WorkerFailed

if TYPE_CHECKING:
    import torch


Report = Callable[[Any], None]
"""A function by which a worker sends a value to its parent."""


_IDENTITY: Final = (
    "SEALRING_SECRET_FILE", "SEALRING_CERTIFICATE", "SEALRING_KEY", "SEALRING_AUTHORITY"
)  # fmt: skip
"""The user's own identity, which is removed: these workers have another, and two are refused."""
_CAUSE_SECONDS: Final = 5.0
"""When a worker reports that it lost another: how long to wait for the other's own error."""


def run_workers(
    count: int,
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Starts `count` processes that call target(rank, report, *arguments); yields (rank, report).

    Ends when all have ended. If one fails, the others are ended, too, and WorkerFailed is raised.
    It is about a worker that failed by itself, if possible, and not about one that lost another.
    """
    with meeting_place() as place:
        yield from _run(count, target, arguments, {**place, **(environment or {})})


def environment_of(
    rank: int, count: int, secret: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment that torchrun would give a worker, with an identity."""
    return {
        **{name: value for name, value in os.environ.items() if name not in _IDENTITY},
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "SEALRING_SECRET": secret,
        "SEALRING_JOB": "local",
        **environment,
    }


def forking_context() -> Any:
    """A multiprocessing context in which one process imports torch and sealring, and workers are
    forks of it. So the import, which takes seconds, is done once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sealring.core.group.create", __name__])
    return context


def _run(
    count: int,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> Iterator[tuple[int, Any]]:
    context = forking_context()
    reports = context.Queue()
    secret = secrets.token_hex(32)
    processes = [
        context.Process(
            target=_worker,
            args=(
                rank,
                environment_of(rank, count, secret, environment),
                reports,
                target,
                arguments,
            ),
            name=f"sealring-worker-{rank}",
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        yield from _reports_of(processes, reports)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _reports_of(processes: list[Any], reports: Any) -> Iterator[tuple[int, Any]]:
    running = set(range(len(processes)))
    consequence: WorkerFailed | None = None
    until = math.inf
    while running and time.monotonic() < until:
        # Read before the queue, so that all reports of ended workers are in the queue.
        ended = {rank: each.exitcode for rank, each in enumerate(processes) if not each.is_alive()}
        try:
            kind, rank, value = reports.get(timeout=0.5)
        except queue.Empty:
            for rank in running & ended.keys():
                if status := ended[rank]:
                    raise WorkerFailed(f"worker {rank} ended with exit status {status}") from None
            running -= ended.keys()
            continue
        if kind == "report":
            yield rank, value
            continue
        running.discard(rank)
        if kind == "failed":
            text, another_ended = value
            failed = WorkerFailed(f"worker {rank} failed:\n{text}")
            if not another_ended:
                raise failed
            consequence = consequence or failed
            until = min(until, time.monotonic() + _CAUSE_SECONDS)
    if consequence is not None:
        raise consequence


def _worker(
    rank: int,
    environment: Mapping[str, str],
    reports: Any,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # Replaced completely: the inherited one is from the start of the fork server.
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # One thread each, because the workers run in parallel.
    torch.set_num_threads(1)
    try:
        target(rank, lambda value: reports.put(("report", rank, value)), *arguments)
    except BaseException as error:
        another_ended = isinstance(error, PeerLost | PeerUnreachable)
        reports.put(("failed", rank, (traceback.format_exc(), another_ended)))
        sys.exit(1)
    reports.put(("done", rank, None))
    with suppress(ValueError):
        reports.close()
    reports.join_thread()


def _end_with_parent() -> None:
    """Ends this worker when the process that started it ends, however that happens.

    The kernel's PR_SET_PDEATHSIG does not help: it is about the fork server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """Opens a rendezvous store in this process; yields the variables by which workers find it.

    The system chooses the port when the store opens, so no other program can take it before.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


# ---- the devices of tensors


KINDS: Final = ("cpu", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "cpu"
    """The name in results: `cpu`, or the GPU's name."""
    gpus: int = 0

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """Torch's own backend for tensors on this device."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def shared_by(self, ranks: int) -> bool:
        """Whether several ranks share a GPU."""
        return self.kind == "cuda" and ranks > self.gpus

    def enter(self, rank: int, ranks: int) -> torch.device:
        """Called in a worker before it makes a group: returns the device of this rank's tensors."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        if self.shared_by(ranks):
            os.environ.update(nccl_on_a_shared_gpu(rank))
        device = torch.device("cuda", rank % self.gpus)
        torch.cuda.set_device(device)
        # Float32 products on the tensor cores in TF32, as is usual for training on GPUs.
        torch.set_float32_matmul_precision("high")
        return device

    def free_bytes(self) -> int:
        """The free memory of the machine, or of the GPU with the least."""
        if self.kind == "cpu":
            return _available_memory()
        import torch

        return min(torch.cuda.mem_get_info(index)[0] for index in range(self.gpus))


CPU: Final = WorkerPlace()


def settle(device: torch.device) -> None:
    """Waits until the device has done all its queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_place(wanted: str) -> WorkerPlace:
    """The place for --device: `cpu`, `cuda`, or `auto`, which means GPUs if torch finds any."""
    import torch

    if wanted not in KINDS:
        raise ConfigurationError(f"--device is {wanted!r}; it must be one of {', '.join(KINDS)}")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ConfigurationError("torch finds no GPU here: measure on CPUs, or where there is one")
    return WorkerPlace("cuda", str(torch.cuda.get_device_name(0)), torch.cuda.device_count())


def nccl_on_a_shared_gpu(rank: int) -> dict[str, str]:
    """The environment that lets ranks use NCCL on one GPU.

    NCCL refuses two ranks of one host on one GPU. With a different host id each, it treats them as
    different hosts and uses the loopback, which is slower than its ways between GPUs.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    }


SHARED_GPU: Final = (
    "several ranks share a GPU: each has an NCCL_HOSTID of its own, and NCCL goes by the loopback, "
    "without peer and shared memory"
)
"""The note in the output if nccl_on_a_shared_gpu() was needed."""


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 62
