from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Literal, TypedDict

from typing_extensions import Buffer

# ---- codes and limits: the values are the module's ----------------------------------------------

class DType(IntEnum):
    """What a tensor's elements are; bound into every record."""

    FLOAT16 = ...
    BFLOAT16 = ...
    FLOAT32 = ...
    FLOAT64 = ...
    INT8 = ...
    INT16 = ...
    INT32 = ...
    INT64 = ...
    UINT8 = ...
    UINT16 = ...
    UINT32 = ...
    UINT64 = ...
    BOOL = ...
    COMPLEX64 = ...
    COMPLEX128 = ...
    BYTES = ...
    """Opaque: can be copied and sent, not reduced."""

    @property
    def itemsize(self) -> int: ...

class ReduceKind(IntEnum):
    """How contributions are combined."""

    NONE = ...
    SUM = ...
    PRODUCT = ...
    MIN = ...
    MAX = ...
    BAND = ...
    BOR = ...
    BXOR = ...
    AVG = ...
    PREMUL_SUM = ...

class Action(IntEnum):
    """What a step of a program does."""

    SEND = ...
    PUBLISH = ...
    FORWARD = ...
    RECEIVE = ...
    RECEIVE_REDUCE = ...
    COPY = ...
    REDUCE = ...
    AVERAGE = ...
    PREMULTIPLY = ...

class FailureCode(IntEnum):
    """How a group failed; travels in alerts."""

    TAMPERED = ...
    MISSING = ...
    REPLAYED = ...
    OUT_OF_STEP = ...
    PEER_LOST = ...
    PEER_SILENT = ...
    CLOSED = ...
    NO_LONGER_ADMITTED = ...

class RecordKind(IntEnum):
    PAIR = ...
    GROUP = ...
    ALERT = ...
    BYE = ...
    ANNOUNCE = ...
    ACCEPT = ...
    DATA = ...
    STATUS = ...
    FETCHED = ...

KEY_BYTES: int
TAG_BYTES: int
HEADER_BYTES: int
MAX_PAYLOAD_BYTES: int
GPU_PAYLOAD_BYTES: int
MAX_ALERT_TEXT_BYTES: int
SEGMENT_WINDOW: int
MAX_LANES: int
STRIPE_SEGMENTS: int
FORWARD_BUDGET_BYTES: int
ANYONE: int

# ---- the core -----------------------------------------------------------------------------------

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
    def moved(source: bytes) -> Secret:
        """A copy; the source is overwritten. It must be a new object that nothing else holds."""
    @staticmethod
    def from_hex(text: Buffer) -> Secret: ...
    def write_hex(self, into: Buffer) -> None: ...
    def part(self, start: int, size: int) -> Secret: ...
    def derive(self, salt: bytes, info: bytes, size: int) -> Secret:
        """HKDF with SHA-256."""
    def derive_each(self, salt: bytes, infos: tuple[bytes, ...], size: int) -> list[Secret]:
        """The same with each info in turn."""
    def hmac_sha256(self, data: bytes) -> bytes: ...
    def seal(self, nonce: bytes, plain: Buffer, associated: bytes) -> bytes:
        """AES-256-GCM; the tag comes last."""
    def open(self, nonce: bytes, sealed: bytes, associated: bytes) -> bytes | None: ...
    def open_into(self, nonce: bytes, sealed: bytes, associated: bytes, into: Buffer) -> bool:
        """Opens into the buffer, which its owner can overwrite; False where the tag is wrong."""
    def wipe(self) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FreedMemoryOverwritten:
    """While one exists, larger blocks of memory are overwritten when they are freed."""
    def __init__(self) -> None: ...

def erase(memory: Buffer) -> None:
    """Overwrites a writable buffer."""

def erase_each(buffers: tuple[bytes | bytearray, ...]) -> None:
    """Overwrites those that are bytearrays."""

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
        steps: Sequence[tuple[Action, int, Sequence[int], int, int, int, Sequence[int], int]],
        levels: int = 1,
    ) -> None: ...

class LinkMemory:
    """Mapped once, given to one link, unmapped with it (or with this object)."""
    def __init__(self, file: int, ring_bytes: int, writable: bool) -> None: ...

class Failure:
    """How a group failed, as the rank that saw it tells it. Ranks are those of the group."""
    def __init__(
        self,
        code: FailureCode,
        text: str,
        peer: int = -1,
        collective: int = 0,
        reported_by: int = -1,
        told_by: int = -1,
    ) -> None: ...
    @property
    def code(self) -> FailureCode: ...
    @property
    def peer(self) -> int:
        """The rank that it is about; -1 if none."""
    @property
    def collective(self) -> int:
        """The number of the collective; 0 outside of any."""
    @property
    def reported_by(self) -> int:
        """The rank that saw it, as `told_by` says; -1 if this one did."""
    @property
    def told_by(self) -> int:
        """The rank whose alert or refusal told it; -1 if none did."""
    @property
    def text(self) -> str:
        """As people read it: ranks by their numbers in the job, codes by their names."""

class Names:
    """How the texts of failures name ranks and codes."""
    def __init__(
        self,
        members: Sequence[int],
        operations: Mapping[int, str],
        algorithms: Mapping[int, str],
        rooted: AbstractSet[int],
        remarks: Mapping[int, str],
    ) -> None:
        """`remarks`, by operation, follow a text that names this operation."""
    def rank(self, rank: int) -> str: ...

class FirstFailure:
    """The one failure of a group, which its engine and its mailbox share."""
    def __init__(self) -> None: ...
    def settle(self, failure: Failure) -> Failure: ...

class Lease:
    """Until when a broker admits this worker; checked while records move."""
    def __init__(self) -> None: ...
    def extend(self, boottime_end: int, wall_end: int) -> None:
        """Nanoseconds of CLOCK_BOOTTIME and of the wall clock: the first that comes ends it."""
    @property
    def ended(self) -> bool: ...

class Device:
    """A device that belongs to no engine or mailbox yet."""

class CudaDriver:
    """The table of CUDA driver functions that a GPU is driven with."""

class CallerStream:
    """Where the caller of an operation is, whose tensors a GPU holds."""
    def __init__(self, ready: int = 0, stream: int = 0, streams_wait: bool = False) -> None:
        """`ready` is the event after which the memory may be used; 0: at once.

        With `streams_wait` streams are to wait for the operation, if that is possible now.
        """

class Completion:
    """One operation that was submitted, a collective or a message: running, done or failed."""
    def wait_on_host(self, number: int = 0, timeout_s: float = 0.0) -> Failure | None:
        """Runs the operation, or waits for the thread that does; returns how it failed, if it did.

        The arguments are for a collective, which is numbered when it is run.
        """
    def wait_on_stream(self, stream: int) -> None:
        """Later work of the stream waits until it is done, or its results are overwritten."""
    @property
    def streams_wait(self) -> bool:
        """Streams can wait for it."""
    @property
    def done(self) -> bool:
        """Where streams wait: whether they would go on."""
    @property
    def error(self) -> Failure | None: ...
    @property
    def peer(self) -> int:
        """Of a message that is done: the rank at its other end."""

class Dismissal:
    """A link that came after its group's end."""

    def say(self) -> None:
        """Tells the peer how the group ended, which may take seconds, and closes the link."""

class Endpoint:
    """One rank's end of the links of a group's collectives, or of its messages."""
    def use_lease(self, lease: Lease) -> None: ...
    def add_tcp_link(
        self,
        peer: int,
        socket: int,
        send_key: Secret,
        receive_key: Secret,
        peer_group_key: Secret | None = None,
    ) -> None: ...
    def add_shm_link(
        self,
        peer: int,
        socket: int,
        own: LinkMemory,
        theirs: LinkMemory,
        send_key: Secret,
        receive_key: Secret,
        peer_group_key: Secret | None = None,
    ) -> None: ...
    def add_member(self, peer: int, group_key: Secret) -> None:
        """A member that may be linked late; what it seals for all is opened with this key."""
    def add_late_link(
        self,
        peer: int,
        socket: int,
        own: LinkMemory | None,
        theirs: LinkMemory | None,
        send_key: Secret,
        receive_key: Secret,
    ) -> Dismissal | None:
        """From any thread. Where the group has ended the peer is still to be told so."""
    def commitments(
        self,
    ) -> list[tuple[int, int, tuple[int, bytes] | None, tuple[int, bytes] | None]]:
        """Of each link, also when the group has ended: peer, lane, sent, received.

        (data records, running SHA-256); None where the host does not see the records' tags.
        """
    def attach(self, device: Device) -> None: ...
    def attach_cuda(
        self,
        ordinal: int,
        seal: int,
        open: int,
        command_kernel: int = 0,
        driver: CudaDriver | None = None,
    ) -> None: ...
    def release_gpu(self, patience_s: float) -> bool:
        """Gives back what an ended group has of the GPU; False where that cannot be yet."""
    def close(self) -> None: ...
    def fail(self, failure: Failure) -> None: ...

class Call:
    """A collective: what to run, and on which memory."""
    def __init__(
        self,
        program: Program,
        slots: Sequence[tuple[int, int]],
        *,
        total: int | None,
        root: int,
        dtype: DType,
        reduction: ReduceKind,
        factor: float,
        segment_bytes: int,
        wired: bool,
        lanes: int = 1,
    ) -> None: ...

class Engine(Endpoint):
    def __init__(
        self,
        rank: int,
        world: int,
        context: bytes,
        group_key: Secret,
        record_bytes: int,
        rekey_bytes: int,
        first_failure: FirstFailure,
        names: Names,
    ) -> None: ...
    def submit(self, call: Call, caller: CallerStream | None) -> Completion: ...
    def run_at(self, like: Call, address: int, number: int, timeout_s: float) -> Failure | None:
        """Runs a call like an earlier one, whose first slot begins at another address."""
    def add_lane_link(
        self,
        lane: int,
        peer: int,
        socket: int,
        own: LinkMemory | None,
        theirs: LinkMemory | None,
    ) -> None:
        """One more pipe to a rank that has a link, under keys of its own."""
    def complete_lanes(self, peers: Sequence[int]) -> None:
        """All to these ranks are made: forgets the keys from which theirs came."""
    def drop_lanes(self, peers: Sequence[int]) -> None:
        """Closes the further lanes to these ranks; there will be none from here on."""
    def launch_rest(self) -> None: ...
    def mark_end(self, collective: Completion) -> None: ...
    def release_streams(self, collective: Completion) -> None:
        """Lets streams go on that wait for what has failed, without a result."""
    def add_reduction(self, dtype: DType, kind: ReduceKind, functions: Sequence[int]) -> None: ...
    def offer_gpu_wires(self, slots: int, payload: int) -> bytes: ...
    def open_gpu_wire(self, peer: int, handle: bytes) -> None: ...
    def offer_host_wires(self, slots: int, payload: int, file: int) -> None: ...
    def open_host_wire(self, peer: int, file: int, bytes: int) -> None: ...
    def mark_mixed(self) -> None: ...
    def new_meeting_id(self) -> bytes: ...
    def offer_exchanges(self, half_bytes: int) -> None: ...
    def meet(self, id: bytes, peers: Sequence[int], patience_s: float) -> None: ...
    def connect(self, peers: Sequence[int], patience_s: float) -> None: ...
    def put_late_keys(self) -> None:
        """Gives the GPU the keys of links that came after it."""
    def use_wires(self) -> None: ...
    def drop_wires(self) -> None: ...
    @property
    def wired(self) -> bool: ...
    @property
    def wire_slots(self) -> int: ...
    @property
    def largest_segment(self) -> int: ...
    @property
    def exchanges(self) -> bool: ...
    @property
    def prelaunch_stream(self) -> int: ...
    def interrupt(self) -> None: ...
    @property
    def runs_here(self) -> bool:
        """In the handler of a signal that came while this thread runs a collective."""
    def account(self) -> Account: ...
    def sealed_and_opened(self) -> tuple[int, int]: ...

class MailAccount(TypedDict):
    sealed_bytes: int
    opened_bytes: int
    memory_bytes: int

class Message:
    """As its caller has it; `memory` is an address and a number of bytes."""
    def __init__(
        self, sends: bool, peer: int, tag: int, memory: tuple[int, int], timeout_s: float
    ) -> None: ...
    @property
    def peer(self) -> int: ...

class Mailbox(Endpoint):
    def __init__(
        self,
        rank: int,
        world: int,
        context: bytes,
        record_bytes: int,
        rekey_bytes: int,
        gpu_record_bytes: int,
        first_failure: FirstFailure,
        names: Names,
    ) -> None: ...
    def expect_late_links(self) -> None: ...
    def submit(self, message: Message, caller: CallerStream | None) -> Completion | Failure: ...
    def finished(self) -> list[Completion] | Failure:
        """Those that are done and that no thread waited for; none once the mailbox is closed."""
    def release_streams(self) -> None: ...
    @property
    def persistent_kernel_runs(self) -> bool: ...
    def account(self) -> MailAccount: ...

class Cipher:
    """Both ends of one key, at addresses; opens in the order it sealed. The tag comes last."""
    def __init__(self, key: bytes) -> None: ...
    def seal(self, plain: int, bytes: int, sealed: int) -> None: ...
    def open(self, sealed: int, bytes: int, plain: int) -> bool: ...

def reduce(dst: int, src: int, bytes: int, dtype: DType, kind: ReduceKind) -> None: ...
def aead_seal(key: bytes, nonce: bytes, associated: bytes, plain: bytes) -> bytes: ...
def aead_open(key: bytes, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None: ...
def gpu_key(key: bytes) -> bytes: ...
def cuda_launch(
    function: int, blocks: int, threads: int, cluster: int, argument: bytes, stream: int
) -> None: ...
def ratchet(key: bytes) -> bytes: ...
def parse_header(bytes: bytes) -> dict[str, int] | None: ...
def parse_alert(bytes: bytes, sender: int, receiver: int, ranks: int) -> Failure: ...
def openssl_version() -> str: ...
def openssl_version_number() -> int: ...

OPENSSL_BUILT_IN: bool
"""Whether libcrypto is a part of this module, not the system's."""

def exchange_window(levels: int) -> int:
    """How many segments are open at once where GPUs exchange records."""

def wire_area_bytes(slots: int, payload: int) -> int: ...

class GpuKeys:
    """Keys in a GPU's memory: 64 bytes each, in the order in which they were added."""
    def __init__(self, ordinal: int, entries: int) -> None: ...
    def add(self, key: Secret) -> None: ...
    def add_file(self, file: SealedFileReader) -> None:
        """The key of the file's chunks and their base nonce."""
    def use_until(self, stream: int) -> None:
        """The keys are overwritten after what this stream has been given until now."""
    def wipe(self) -> None:
        """Overwrites all of them. Wait for launches that use them first."""
    @property
    def start(self) -> int:
        """Where the GPU finds the first."""

ChunkHash = Literal["sha256"] | Callable[[memoryview, int, int], bytes]
"""SHA-256 by OpenSSL, or f(view, step, count): the digests of `count` chunks, `step` bytes apart.

It must not keep the view. Of the chunks in it each has 16 KiB, and the last what is left.
"""

class SealedFileWriter:
    """Writes C2SP's chunked encryption to a file, or to memory where `file` is -1."""
    def __init__(
        self,
        file: int,
        key: Secret,
        suite: str,
        context: bytes,
        name: str,
        threads: int = 0,
        hash: ChunkHash | None = None,
    ) -> None: ...
    def write(self, pieces: Sequence[Buffer]) -> None: ...
    def finish(self) -> None: ...
    def take(self) -> bytes:
        """The ciphertext since the last call, where it goes to memory."""
    @property
    def digests(self) -> bytes:
        """Of each chunk's plaintext, once it is finished, if it has a hash."""
    @property
    def commitment(self) -> bytes: ...
    @property
    def length(self) -> int:
        """Bytes of plaintext so far."""

class SealedFileReader:
    """Opens a file, or what read(offset, size) returns, if the commitment and the length hold."""
    def __init__(
        self,
        source: int | Callable[[int, int], Buffer],
        key: Secret,
        suite: str,
        context: bytes,
        name: str,
        threads: int = 0,
        size: int = 0,
    ) -> None: ...
    def expect(self, digests: bytes, hash: ChunkHash = "sha256") -> None:
        """From now on a chunk with another digest than this list has is TamperedChunk."""
    def read_boxes(
        self,
        wanted: Sequence[tuple[Buffer, int, int, Sequence[int], Sequence[int], Sequence[int]]],
    ) -> None:
        """Fills each buffer with a box (offsets, lengths) of an array (start, item size, shape)."""
    def read_into(self, offset: int, into: Buffer) -> None:
        """The buffer is memory that no other process sees: chunks are opened there."""
    def read_runs(self, offsets: Buffer, sizes: Buffer, into: Buffer) -> None:
        """Fills the buffer with runs of bytes, one behind the other; arrays of uint64 say which.

        As for `read_into`, no other process sees it.
        """
    def verify(self, first: int, count: int) -> int:
        """Opens chunks and keeps nothing; returns the number of the next one."""
    def close(self) -> None:
        """Wipes the key, after the reads that are under way. Later ones are AlreadyClosed."""
    @property
    def chunks(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def commitment(self) -> bytes: ...

def copy_sealed(
    files: Sequence[SealedFileReader], runs: Buffer, into: Buffer, threads: int
) -> None:
    """Copies bytes of sealed files as they are, for a device that opens them itself.

    `runs` has rows of four uint64: the file's place in `files`, offset, size, place in `into`.
    """

def sealed_length(plain: int) -> int:
    """The length of a sealed file that holds so many bytes."""

def chunk_digests(plain: Buffer, hash: ChunkHash = "sha256") -> bytes:
    """The digest of every chunk that a sealed file of these bytes has."""

def wrap_key(wrapping: Secret, key: Secret) -> bytes:
    """AES-256 key wrap with padding (RFC 5649)."""

def unwrap_key(wrapping: Secret, wrapped: bytes) -> Secret | None:
    """None where it was not wrapped under this key."""

class Authority:
    """What signs certificates, from its own; ValueError if that is none."""
    def __init__(self, certificate: bytes) -> None: ...

class ReadCertificate:
    """A certificate that was read. From `uri` on only where it claims something."""
    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of it."""
    @property
    def readable(self) -> bool:
        """It is a certificate; otherwise nothing else here has a meaning."""
    @property
    def signed(self) -> bool:
        """One of the authorities that it was read with has signed it, with none in between."""
    @property
    def starts(self) -> int:
        """Seconds since 1970."""
    @property
    def ends(self) -> int: ...
    @property
    def problem(self) -> str:
        """Why it is not a worker's."""
    @property
    def uri(self) -> str:
        """Its only name."""
    @property
    def world(self) -> int | None: ...
    @property
    def states_constraints(self) -> bool:
        """It has basic constraints."""
    @property
    def is_authority(self) -> bool: ...
    @property
    def foreign(self) -> bytes:
        """All of it, if it has a key or extensions that sealring does not issue; else nothing."""
    @property
    def key(self) -> str:
        """SHA-256 of its public key (SubjectPublicKeyInfo), in hexadecimal."""

def read_certificate(certificate: bytes) -> ReadCertificate:
    """Of any signer."""

def read_certificates(
    certificates: tuple[bytes, ...], authorities: tuple[Authority, ...]
) -> list[ReadCertificate]:
    """What they claim is read of those that one of the authorities has signed."""

def wrong_signatures(
    certificates: tuple[ReadCertificate, ...], signatures: tuple[bytes, ...], message: bytes
) -> list[int]:
    """The places of the signatures over the message that are not by the certificates' keys."""

def receive_now(descriptor: int, most: int, peek: bool = False) -> bytes | None:
    """Up to `most` bytes that a socket has, at most 16 KiB; None where it has none.

    It never waits, and keeps the interpreter's lock. With `peek` the bytes stay there.
    """

MAX_STATEMENT_BYTES: int

def encode_bundle(entries: Mapping[int, bytes | bytearray], head: bytes) -> bytearray:
    """`head`, and then each entry of a dict with its rank and length, in the order of the ranks."""

def parse_bundle(raw: Buffer, start: int) -> dict[int, bytearray]:
    """The entries from `start` on; ValueError where that is no bundle."""

FRAME_BYTES: int

class FrameSealer:
    """Seals what goes one way over a connection under a session, in frames of AES-256-GCM.

    `start` is how every frame begins. A frame's number is its nonce. Use after `wipe` is a
    RuntimeError, and in a forked child ForkedProcess.
    """
    def __init__(self, key: Secret, start: bytes) -> None: ...
    def seal(self, plain: Buffer) -> bytes:
        """As many frames as it needs: one for each FRAME_BYTES."""
    def wipe(self) -> None: ...

class FrameOpener:
    """The other end of a FrameSealer."""
    def __init__(self, key: Secret, start: bytes) -> None: ...
    def receive(self, descriptor: int) -> bytearray | None:
        """What the next frame holds; None while some of it has not come. It never waits.

        No byte behind the frame is taken. OSError where the connection is cut, ValueError where
        what came is no frame of the other end.
        """
    def wipe(self) -> None: ...

class Statements:
    """What the members of a group say, in the group's order; ValueError says what is no statement.

    Their contributions lie in the memory for keys.
    """
    def __init__(self, encoded: tuple[Buffer, ...]) -> None: ...
    def rows(self) -> list[tuple[int, str, bytes, bytes, bytes, bytes, bool]]:
        """Of each: rank, instance, host, addresses, certificate and its SHA-256, contributes."""
    def transcript(self, before: bytes) -> bytes:
        """SHA-256 over fields with their lengths, `before` and then those of every statement."""
    def first_wrong_value(self, before: bytes, shown: tuple[Buffer, ...]) -> int:
        """The place of the first value that its member had not committed to; -1 if there is none.

        A commitment is SHA-256 over `before` and the value with its length.
        """
    def group_secret(self, transcript: bytes, purpose: bytes, bytes: int) -> Secret:
        """From every member's contribution; they are wiped."""
