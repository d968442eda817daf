"""For tests alone: a device and a CUDA driver played by the CPU. No wheel contains it."""

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
    """What stands for the handle of a kernel that was compiled for a dtype and a reduction."""

def host_driver() -> CudaDriver: ...
def change_next_exchange(receiver: int) -> None:
    """Changes the next message that comes to this rank by an exchange."""

def messages_exchanged() -> int:
    """Messages with records that left by exchanges, of all ranks in this process until now."""

def new_stream() -> int: ...
def put(stream: int, task: Callable[[], None]) -> None:
    """The stream calls it when it has come so far. It must not raise."""

class Probe:
    """Watches a host device, and makes it fail."""
    def __init__(self) -> None: ...
    def fail(self) -> None: ...
    @property
    def log(self) -> Sequence[str]:
        """What the device was given to do: "seal 4096", "open 4096", "copy 64", ..."""

def host_device(lag: int, world: int, probe: Probe) -> Device: ...
def gpu_aead_seal(key: bytes, nonce: bytes, associated: bytes, plain: bytes) -> bytes:
    """ChaCha20-Poly1305 by the arithmetic that GPUs run."""

def gpu_aead_open(key: bytes, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None: ...
