from collections.abc import Sequence
from typing import TypedDict

from typing_extensions import Buffer

class Account(TypedDict):
    sealed_bytes: int
    opened_bytes: int
    sealed_records: int
    opened_records: int
    forwarded_records: int
    sleeps: int
    run_s: float
    """In collectives; the five below add up to it."""
    seal_s: float
    open_s: float
    reduce_s: float
    transfer_s: float
    wait_s: float
    waited_s: list[float]
    rekeys: list[int]
    memory_bytes: int

Prepared = tuple[int, int, int, int]
"""A GPU's part of a collective: its first shift, how many, how many more, scratch memory."""

class ProcessMark:
    """The process in which it was made. A forked child is another one."""
    def __init__(self) -> None: ...
    @property
    def here(self) -> bool: ...
    def require(self, what: str) -> None:
        """Raises ForkedProcess, about `what`, if this is another process."""

class Secret:
    """Bytes in the memory for keys, which forked children and core files do not get.

    Its buffer is that memory itself. Every use but `wipe` raises ForkedProcess in a child.
    """
    def __init__(self, source: Buffer) -> None: ...
    @staticmethod
    def zeros(size: int) -> Secret: ...
    @staticmethod
    def random(size: int) -> Secret: ...
    @staticmethod
    def from_hex(text: Buffer) -> Secret: ...
    def write_hex(self, into: Buffer) -> None: ...
    def part(self, start: int, size: int) -> Secret: ...
    def derive(self, salt: bytes, info: bytes, size: int) -> Secret:
        """HKDF with SHA-256."""
    def hmac_sha256(self, data: bytes) -> bytes: ...
    def seal(self, nonce: bytes, plain: bytes, associated: bytes) -> bytes:
        """AES-256-GCM; the tag comes last."""
    def open(self, nonce: bytes, sealed: bytes, associated: bytes) -> bytes | None: ...
    def wipe(self) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FreedMemoryOverwritten:
    """While one exists, larger blocks of memory are overwritten when they are freed."""
    def __init__(self) -> None: ...

def erase(memory: Buffer) -> None:
    """Overwrites a writable buffer."""

def secret_memory_report() -> tuple[int, int]:
    """Bytes of the memory for keys: mapped, and of these locked into RAM."""

class Program:
    def __init__(
        self,
        operation: int,
        algorithm: int,
        rank: int,
        world: int,
        slots: int,
        scratch: Sequence[int],
        steps: Sequence[tuple[int, int, Sequence[int], int, int, int, Sequence[int]]],
    ) -> None: ...

class LinkMemory:
    """Mapped once, given to one link, unmapped with it (or with this object)."""
    def __init__(self, file: int, ring_bytes: int, writable: bool) -> None: ...

class FirstFailure:
    """The one failure of a group, which its engine and its mailbox share."""
    def __init__(self) -> None: ...
    def settle(self, failure: tuple[int, int, int, int, str]) -> tuple[int, int, int, int, str]: ...

class Lease:
    """Until when a broker admits this worker; what moves records checks it (native/lease.hpp)."""
    def __init__(self) -> None: ...
    def extend(self, boottime_end: int, wall_end: int) -> None:
        """Nanoseconds of CLOCK_BOOTTIME and of the wall clock: the first that comes ends it."""
    @property
    def ended(self) -> bool: ...

class Engine:
    def __init__(
        self,
        rank: int,
        world: int,
        context: bytes,
        group_key: Secret,
        record_bytes: int,
        rekey_bytes: int,
        first_failure: FirstFailure,
    ) -> None: ...
    def use_lease(self, lease: Lease) -> None: ...
    def add_tcp_link(
        self, peer: int, socket: int, send_key: Secret, receive_key: Secret, peer_group_key: Secret
    ) -> None: ...
    def add_shm_link(
        self,
        peer: int,
        socket: int,
        own: LinkMemory,
        theirs: LinkMemory,
        send_key: Secret,
        receive_key: Secret,
        peer_group_key: Secret,
    ) -> None: ...
    def run(
        self,
        program: Program,
        slots: Sequence[tuple[int, int]],
        number: int,
        total: int | None,
        root: int,
        dtype: int,
        reduction: int,
        factor: float,
        segment_bytes: int,
        timeout_s: float,
        ready: int | None = None,
        wired: bool = False,
        prepared: Prepared | None = None,
    ) -> tuple[int, int, int, int, str] | None: ...
    def prepare(
        self,
        program: Program,
        slots: Sequence[tuple[int, int]],
        dtype: int,
        reduction: int,
        segment_bytes: int,
        wired: bool,
        stream: int,
    ) -> Prepared | None:
        """Gives the GPU its part ahead; None where it is too much."""
    def prepare_rest(self) -> None: ...
    def spoil(
        self,
        program: Program,
        slots: Sequence[tuple[int, int]],
        segment_bytes: int,
        wired: bool,
        prepared: Prepared,
    ) -> None:
        """Lets streams go on that wait for what has failed, without a result."""
    def attach_cuda(self, ordinal: int, seal: int, open: int, serve: int = 0) -> None: ...
    def add_reduction(self, dtype: int, kind: int, functions: Sequence[int]) -> None: ...
    def offer_gpu_wires(self, slots: int, payload: int) -> bytes: ...
    def open_gpu_wire(self, peer: int, handle: bytes) -> None: ...
    def offer_host_wires(self, slots: int, payload: int, file: int) -> None: ...
    def open_host_wire(self, peer: int, file: int, bytes: int) -> None: ...
    def new_channel_id(self) -> bytes: ...
    def offer_channels(self, slots: int, payload: int) -> None: ...
    def open_channel(self, peer: int, id: bytes, sends: bool) -> None: ...
    def use_wires(self) -> None: ...
    def drop_wires(self) -> None: ...
    @property
    def wired(self) -> bool: ...
    @property
    def channelled(self) -> bool: ...
    @property
    def shift_stream(self) -> int: ...
    def mark_over(self) -> int: ...
    def hold(self, stream: int, over: int) -> None: ...
    def is_over(self, over: int) -> bool: ...
    def attach_host(self, lag: int) -> None:
        """The GPU's part played by this CPU, for tests."""
    def attach_host_driver(self, ahead: bool) -> None:
        """CUDA's driver played by this CPU, for tests."""
    def host_log(self) -> list[str]: ...
    def host_fail(self) -> None: ...
    def release_gpu(self) -> None: ...
    def close(self) -> None: ...
    def interrupt(self) -> None: ...
    def fail(self, failure: tuple[int, int, int, int, str]) -> None: ...
    def account(self) -> Account: ...
    def sealed_and_opened(self) -> tuple[int, int]: ...

class MailAccount(TypedDict):
    sealed_bytes: int
    opened_bytes: int
    memory_bytes: int

_Failed = tuple[int, int, int, int, str] | None

class Mailbox:
    """Every call returns (failure or None, result or None)."""
    def __init__(
        self,
        rank: int,
        world: int,
        context: bytes,
        record_bytes: int,
        rekey_bytes: int,
        gpu_record_bytes: int,
        first_failure: FirstFailure,
    ) -> None: ...
    def use_lease(self, lease: Lease) -> None: ...
    def attach_cuda(self, ordinal: int, seal: int, open: int, carry: int = 0) -> None: ...
    def attach_host(self, lag: int) -> None:
        """The GPU's part played by this CPU, for tests."""
    def attach_host_driver(self) -> int:
        """Its driver played by this CPU; returns a stream of its."""
    def host_log(self) -> list[str]: ...
    def host_fail(self) -> None: ...
    def release_gpu(self, patience_s: float) -> bool: ...
    def add_tcp_link(
        self, peer: int, socket: int, send_key: Secret, receive_key: Secret
    ) -> None: ...
    def add_shm_link(
        self,
        peer: int,
        socket: int,
        own: LinkMemory,
        theirs: LinkMemory,
        send_key: Secret,
        receive_key: Secret,
    ) -> None: ...
    def send(
        self,
        peer: int,
        tag: int,
        address: int,
        bytes: int,
        timeout_s: float,
        ready: int | None,
        stream: int = 0,
        streams_wait: bool = False,
    ) -> tuple[_Failed, int | None]: ...
    def receive(
        self,
        peer: int,
        tag: int,
        address: int,
        bytes: int,
        timeout_s: float,
        ready: int | None,
        stream: int = 0,
        streams_wait: bool = False,
    ) -> tuple[_Failed, int | None]: ...
    def number_of(self, ticket: int) -> int: ...
    def hold(self, stream: int, number: int) -> None: ...
    def is_over(self, number: int) -> bool: ...
    @property
    def porter_is_in(self) -> bool: ...
    def let_streams_go_on(self) -> None: ...
    def wait(self, ticket: int) -> tuple[_Failed, int | None]: ...
    def finished(self) -> tuple[_Failed, list[tuple[int, int]] | None]: ...
    def close(self) -> None: ...
    def fail(self, failure: tuple[int, int, int, int, str]) -> None: ...
    def account(self) -> MailAccount: ...

class Cipher:
    """Both ends of one key, at addresses; opens in the order it sealed. The tag comes last."""
    def __init__(self, key: bytes) -> None: ...
    def seal(self, plain: int, bytes: int, sealed: int) -> None: ...
    def open(self, sealed: int, bytes: int, plain: int) -> bool: ...

def reduce(dst: int, src: int, bytes: int, dtype: int, kind: int) -> None: ...
def aead_seal(key: bytes, nonce: bytes, associated: bytes, plain: bytes) -> bytes: ...
def aead_open(key: bytes, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None: ...
def gpu_aead_seal(key: bytes, nonce: bytes, associated: bytes, plain: bytes) -> bytes: ...
def gpu_aead_open(key: bytes, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None: ...
def gpu_key(key: bytes) -> bytes: ...
def cuda_launch(
    function: int, blocks: int, threads: int, cluster: int, argument: bytes, stream: int
) -> None: ...
def ratchet(key: bytes) -> bytes: ...
def parse_header(bytes: bytes) -> dict[str, int] | None: ...
def parse_alert(bytes: bytes, sender: int) -> tuple[int, int, int, int, str]: ...
def openssl_version() -> str: ...
def openssl_version_number() -> int: ...

OPENSSL_BUILT_IN: bool
"""Whether libcrypto is a part of this module, not the system's."""

def wire_area_bytes(slots: int, payload: int) -> int: ...
