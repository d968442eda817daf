"""For tests only: a device and a CUDA driver played by the CPU. No wheel contains this module."""

from collections.abc import Callable, Sequence
from enum import IntEnum

from sealring._native import CudaDriver, Device, DType, ReduceKind

class Kernel(IntEnum):
    SEAL = 1
    OPEN = 2
    OPEN_REDUCE = 3
    REDUCE = 4
    AVERAGE = 5
    PREMULTIPLY = 6
    RUN_ONE_BATCH = 7
    RUN_ALL_BATCHES = 8

def host_function(kernel: Kernel, dtype: DType = ..., kind: ReduceKind = ...) -> int:
    """Stands for the handle of a kernel compiled for a dtype and a reduction."""

def host_driver() -> CudaDriver: ...
def change_next_exchange(receiver: int) -> None:
    """Changes the next message that comes to this rank by an exchange."""

def messages_exchanged() -> int:
    """How many messages with records all ranks of this process have sent by exchanges."""

def new_stream() -> int: ...
def put(stream: int, task: Callable[[], None]) -> None:
    """Queues a task that the stream calls when it gets there. The task must not raise."""

class Probe:
    """Watches a host device, and makes it fail."""
    def __init__(self) -> None: ...
    def fail(self) -> None: ...
    @property
    def log(self) -> Sequence[str]:
        """The work that the device was given: "seal 4096", "open 4096", "copy 64", ..."""

def host_device(lag: int, world: int, probe: Probe) -> Device: ...
def gpu_aead_seal(key: bytes, nonce: bytes, associated: bytes, plain: bytes) -> bytes:
    """Seals with ChaCha20-Poly1305, by the arithmetic that GPUs run."""

def gpu_aead_open(key: bytes, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None: ...
