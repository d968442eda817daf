"""A world of worker processes on this machine, for measurements and the demo.

Each worker gets the environment that torchrun would give it, and an identity: a job secret that
exists only in these processes' memory. Its tensors are on this machine's cores, or on its GPUs,
which ranks take in turn.
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
"""A worker calls it with whatever it wants its parent to have."""


_IDENTITY: Final = (
    "SEALRING_SECRET_FILE", "SEALRING_CERTIFICATE", "SEALRING_KEY", "SEALRING_AUTHORITY"
)  # fmt: skip
"""The user's own identity is not for these workers, and two would be refused."""
_CAUSE_SECONDS: Final = 5.0
"""When a worker says that it lost another: how long that one may take to say why it ended."""


def run_workers(
    count: int,
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Starts `count` processes that call target(rank, report, *arguments); yields (rank, report).

    Ends when all have ended. If one fails, the rest are ended too and WorkerFailed is raised, about
    a worker that failed by itself rather than one that lost another.
    """
    with meeting_place() as place:
        yield from _run(count, target, arguments, {**place, **(environment or {})})


def environment_of(
    rank: int, count: int, secret: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The one that torchrun would give a worker, with an identity."""
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
    """A context of multiprocessing in which one process imports torch and sealring, and workers are
    forks of it: the import takes seconds, and is paid once for all of them."""
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
        # Looked at before the queue: what one of these reported is in it by now.
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
    # All of it: what this process has is of the time when the first worker was started.
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # One core's worth each: the workers themselves are the parallelism.
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
    """A worker must not outlive the process that asked for it, however that one ends. The kernel's
    PR_SET_PDEATHSIG is about another one, from which the workers are forked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """A rendezvous store in this process, and the environment by which workers find it.

    Its port is chosen by the system when it is opened, so that it cannot be taken meanwhile.
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


# ---- where the tensors are


KINDS: Final = ("cpu", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class Place:
    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "cpu"
    """As results call it: `cpu`, or the GPU's name."""
    gpus: int = 0

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """Torch's own for tensors there."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def shared_by(self, ranks: int) -> bool:
        """Whether several of the ranks are on one GPU."""
        return self.kind == "cuda" and ranks > self.gpus

    def enter(self, rank: int, ranks: int) -> torch.device:
        """In a worker, before it makes a group: where this rank's tensors are from now on."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        if self.shared_by(ranks):
            os.environ.update(nccl_on_a_shared_gpu(rank))
        device = torch.device("cuda", rank % self.gpus)
        torch.cuda.set_device(device)
        # Products of float32 as training on GPUs has them: by the tensor cores, in TF32.
        torch.set_float32_matmul_precision("high")
        return device

    def free_bytes(self) -> int:
        """Of memory: the machine's, or that of the GPU that has least."""
        if self.kind == "cpu":
            return _available_memory()
        import torch

        return min(torch.cuda.mem_get_info(index)[0] for index in range(self.gpus))


CPU: Final = Place()


def settle(device: torch.device) -> None:
    """Waits until what the device was given to do is done."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_place(wanted: str) -> Place:
    """`cpu`, `cuda`, or `auto`: GPUs where torch finds any."""
    import torch

    if wanted not in KINDS:
        raise ConfigurationError(f"--device is {wanted!r}; it must be one of {', '.join(KINDS)}")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ConfigurationError("torch finds no GPU here: measure on CPUs, or where there is one")
    return Place("cuda", str(torch.cuda.get_device_name(0)), torch.cuda.device_count())


def nccl_on_a_shared_gpu(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks of one host on one GPU. With a host's name each it takes them for
    different hosts and goes by the loopback, which is slower than what it does between GPUs."""
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
"""What the output says where nccl_on_a_shared_gpu() was needed."""


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 62
