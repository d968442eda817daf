from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Literal, TypedDict

from typing_extensions import Buffer

# ---- codes and limits: the values are the module's ----------------------------------------------

class DType(IntEnum):
    """The element type of a tensor; every record states it."""

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
    """Raw bytes: can be copied and sent, not reduced."""

    @property
    def itemsize(self) -> int: ...

class ReduceKind(IntEnum):
    """The reduction that combines the ranks' contributions."""

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
    """The kind of a group's failure; sent in alerts."""

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
    """Seconds spent in collectives: the sum of the next five values."""
    seal_s: float
    open_s: float
    reduce_s: float
    transfer_s: float
    wait_s: float
    waited_s: list[float]
    rekeys: list[int]
    memory_bytes: int

class ProcessMark:
    """Marks the process in which it was made. A forked child is a different process."""
    def __init__(self) -> None: ...
    @property
    def here(self) -> bool: ...
    def require(self, what: str) -> None:
        """Raises ForkedProcess, with a text about `what`, in a different process."""

class Secret:
    """Secret bytes in memory that forked children and core files do not get.

    The buffer is that memory itself, not a copy. In a forked child every use except `wipe` raises
    ForkedProcess.
    """
    def __init__(self, source: Buffer) -> None: ...
    @staticmethod
    def zeros(size: int) -> Secret: ...
    @staticmethod
    def random(size: int) -> Secret: ...
    @staticmethod
    def moved(source: bytes) -> Secret:
        """Copies the source and overwrites it. Nothing else may hold the source object."""
    @staticmethod
    def from_hex(text: Buffer) -> Secret: ...
    def write_hex(self, into: Buffer) -> None: ...
    def part(self, start: int, size: int) -> Secret: ...
    def derive(self, salt: bytes, info: bytes, size: int) -> Secret:
        """Derives a secret by HKDF with SHA-256."""
    def derive_each(self, salt: bytes, infos: tuple[bytes, ...], size: int) -> list[Secret]:
        """Derives one secret for each info, like `derive`."""
    def hmac_sha256(self, data: bytes) -> bytes: ...
    def seal(self, nonce: bytes, plain: Buffer, associated: bytes) -> bytes:
        """Seals with AES-256-GCM; the tag follows the ciphertext."""
    def open(self, nonce: bytes, sealed: bytes, associated: bytes) -> bytes | None: ...
    def open_into(self, nonce: bytes, sealed: bytes, associated: bytes, into: Buffer) -> bool:
        """Opens into the caller's buffer; returns False if the tag is wrong."""
    def wipe(self) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FreedMemoryOverwritten:
    """While an instance exists, larger blocks of memory are overwritten when they are freed."""
    def __init__(self) -> None: ...

def erase(memory: Buffer) -> None:
    """Overwrites a writable buffer."""

def erase_each(buffers: tuple[bytes | bytearray, ...]) -> None:
    """Overwrites the buffers that are bytearrays."""

def secret_memory_report() -> tuple[int, int]:
    """Bytes of the memory for keys: (mapped, and how many of them are locked into RAM)."""

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
    """One end's mapped part of a link's memory. It serves one link and is unmapped with it."""
    def __init__(self, file: int, ring_bytes: int, writable: bool) -> None: ...

class Failure:
    """How a group failed, told by the rank that saw it. Ranks are counted within the group."""
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
        """The rank that the failure is about; -1 if none."""
    @property
    def collective(self) -> int:
        """The number of the collective that failed; 0 if it was none."""
    @property
    def reported_by(self) -> int:
        """The rank that saw the failure, according to `told_by`; -1 if this rank did."""
    @property
    def told_by(self) -> int:
        """The rank whose alert or refusal reported the failure; -1 if none did."""
    @property
    def text(self) -> str:
        """The text for people: ranks by their numbers in the job, codes by their names."""

class Names:
    """How failures' texts name ranks and codes."""
    def __init__(
        self,
        members: Sequence[int],
        operations: Mapping[int, str],
        algorithms: Mapping[int, str],
        rooted: AbstractSet[int],
        remarks: Mapping[int, str],
    ) -> None:
        """`remarks` has, by operation, what is added to a text that names the operation."""
    def rank(self, rank: int) -> str: ...

class FirstFailure:
    """The one failure of a group, which its engine and its mailbox share."""
    def __init__(self) -> None: ...
    def settle(self, failure: Failure) -> Failure: ...

class Lease:
    """How long a broker admits this worker; checked while records move."""
    def __init__(self) -> None: ...
    def extend(self, boottime_end: int, wall_end: int) -> None:
        """Sets the ends, in nanoseconds of CLOCK_BOOTTIME and of the wall clock.

        The lease ends when either clock reaches its end.
        """
    @property
    def ended(self) -> bool: ...

class Device:
    """A device that no engine or mailbox has taken yet."""

class CudaDriver:
    """The table of CUDA driver functions that drive a GPU."""

class CallerStream:
    """The caller's stream, for an operation on tensors in a GPU's memory."""
    def __init__(self, ready: int = 0, stream: int = 0, streams_wait: bool = False) -> None:
        """`ready` is the event after which the memory may be used; 0 means at once.

        `streams_wait`: streams are to wait for the operation, if that is possible now.
        """

class Completion:
    """One submitted operation, a collective or a message: running, done or failed."""
    def wait_on_host(self, number: int = 0, timeout_s: float = 0.0) -> Failure | None:
        """Runs the operation, or waits for the thread that does. Returns the failure, if any.

        The arguments are for a collective, which gets its number when it is run.
        """
    def wait_on_stream(self, stream: int) -> None:
        """Makes later work of the stream wait until the operation has ended.

        It has ended when it is done, or when it failed and its results are overwritten.
        """
    @property
    def streams_wait(self) -> bool:
        """Whether streams can wait for the operation."""
    @property
    def done(self) -> bool:
        """Whether the operation is done; if streams wait for it, whether they may go on."""
    @property
    def error(self) -> Failure | None: ...
    @property
    def peer(self) -> int:
        """The rank at the other end of a message that is done."""

class Dismissal:
    """A link that came after its group had ended."""

    def say(self) -> None:
        """Tells the peer how the group ended and closes the link. May take seconds."""

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
        """Adds a member that may be linked late, with the key of the records it publishes."""
    def add_late_link(
        self,
        peer: int,
        socket: int,
        own: LinkMemory | None,
        theirs: LinkMemory | None,
        send_key: Secret,
        receive_key: Secret,
    ) -> Dismissal | None:
        """Adds a link; any thread may call it. Returns a Dismissal if the group has ended."""
    def commitments(
        self,
    ) -> list[tuple[int, int, tuple[int, bytes] | None, tuple[int, bytes] | None]]:
        """(peer, lane, sent, received) of each link, also when the group has ended.

        `sent` and `received` are (number of data records, running SHA-256), or None if the host
        does not see the records' tags.
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
        """Releases the GPU of an ended group; returns False if that is not possible yet."""
    def close(self) -> None: ...
    def fail(self, failure: Failure) -> None: ...

class Call:
    """A call of a collective: the program to run, its memory and its settings."""
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
        """Runs a call like an earlier one, with its first slot at another address."""
    def add_lane_link(
        self,
        lane: int,
        peer: int,
        socket: int,
        own: LinkMemory | None,
        theirs: LinkMemory | None,
    ) -> None:
        """Adds a pipe, with its own keys, to a rank that has a link."""
    def complete_lanes(self, peers: Sequence[int]) -> None:
        """Called when all lanes to these ranks are made. Forgets the keys they came from."""
    def drop_lanes(self, peers: Sequence[int]) -> None:
        """Closes the further lanes to these ranks and allows no new ones."""
    def launch_rest(self) -> None: ...
    def mark_end(self, collective: Completion) -> None: ...
    def release_streams(self, collective: Completion) -> None:
        """Releases the streams that wait for a collective which failed, without a result."""
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
        """Gives the GPU the keys of links that were made after it was attached."""
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
        """Whether this thread runs a collective: true in a signal handler during the run."""
    def account(self) -> Account: ...
    def sealed_and_opened(self) -> tuple[int, int]: ...

class MailAccount(TypedDict):
    sealed_bytes: int
    opened_bytes: int
    memory_bytes: int

class Message:
    """One message to send or receive; `memory` is (address, number of bytes)."""
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
        """Returns messages that ended and that no thread waited for; none once closed."""
    def release_streams(self) -> None: ...
    @property
    def persistent_kernel_runs(self) -> bool: ...
    def account(self) -> MailAccount: ...

class Cipher:
    """Both ends of one key, for memory given by address. Opens in the order of sealing.

    The tag follows the ciphertext.
    """
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
"""Whether libcrypto is built into this module; otherwise it is the system's."""

def exchange_window(levels: int) -> int:
    """How many segments are open at once if GPUs exchange records."""

def wire_area_bytes(slots: int, payload: int) -> int: ...

class GpuKeys:
    """Keys in a GPU's memory: entries of 64 bytes, in the order in which they were added."""
    def __init__(self, ordinal: int, entries: int) -> None: ...
    def add(self, key: Secret) -> None: ...
    def add_file(self, file: SealedFileReader) -> None:
        """Adds the key of the file's chunks and their base nonce."""
    def use_until(self, stream: int) -> None:
        """Delays the overwriting of the keys until the stream has done its present work."""
    def wipe(self) -> None:
        """Overwrites all keys. Wait first for the launches that use them."""
    @property
    def start(self) -> int:
        """The GPU address of the first entry."""

ChunkHash = Literal["sha256"] | Callable[[memoryview, int, int], bytes]
"""How chunks are hashed: "sha256" (OpenSSL's), or a function f(view, step, count).

The function returns the digests of `count` chunks, `step` bytes apart in the view. Each chunk has
16 KiB, the last one the rest. The function must not keep the view.
"""

class SealedFileWriter:
    """Writes C2SP's chunked encryption to a file, or to memory if `file` is -1."""
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
        """Returns the ciphertext made since the last call, when writing to memory."""
    @property
    def digests(self) -> bytes:
        """The digests of the chunks' plaintext, after `finish`, if a hash was given."""
    @property
    def commitment(self) -> bytes: ...
    @property
    def length(self) -> int:
        """The bytes of plaintext written so far."""

class SealedFileReader:
    """Opens a sealed file whose commitment and length are right.

    `source` is a file descriptor, or a function read(offset, size) that returns bytes.
    """
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
        """From now on a chunk whose digest is not the one in this list is a TamperedChunk."""
    def read_boxes(
        self,
        wanted: Sequence[tuple[Buffer, int, int, Sequence[int], Sequence[int], Sequence[int]]],
    ) -> None:
        """Fills each buffer with a box (offsets, lengths) of an array (start, item size, shape)."""
    def read_into(self, offset: int, into: Buffer) -> None:
        """Fills the buffer. No other process may see its memory: chunks are opened there."""
    def read_runs(self, offsets: Buffer, sizes: Buffer, into: Buffer) -> None:
        """Fills the buffer with runs of bytes of the file, one after the other.

        `offsets` and `sizes` are arrays of uint64. No other process may see the buffer's memory.
        """
    def verify(self, first: int, count: int) -> int:
        """Checks chunks without keeping their plaintext; returns the next chunk's number."""
    def close(self) -> None:
        """Waits for the reads under way, then wipes the key. Later reads raise AlreadyClosed."""
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
    """Copies sealed files' bytes without opening them, for a device that opens them itself.

    `runs` has rows of four uint64: the file's place in `files`, offset, size, place in `into`.
    """

def sealed_length(plain: int) -> int:
    """The length of a sealed file with this many bytes of plaintext."""

def chunk_digests(plain: Buffer, hash: ChunkHash = "sha256") -> bytes:
    """The digest of every chunk of a sealed file that would hold these bytes."""

def wrap_key(wrapping: Secret, key: Secret) -> bytes:
    """Wraps a key by AES-256 key wrap with padding (RFC 5649)."""

def unwrap_key(wrapping: Secret, wrapped: bytes) -> Secret | None:
    """Unwraps a key; None if it was not wrapped under this wrapping key."""

class Authority:
    """A signer of certificates, read from its own certificate; ValueError if it is none."""
    def __init__(self, certificate: bytes) -> None: ...

class ReadCertificate:
    """A certificate that was read.

    The fields from `uri` on have a meaning only if its claims were read and `problem` is empty.
    """
    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate."""
    @property
    def readable(self) -> bool:
        """Whether it is a certificate; if not, nothing else here has a meaning."""
    @property
    def signed(self) -> bool:
        """Whether one of the given authorities has signed it directly."""
    @property
    def starts(self) -> int:
        """Seconds since 1970."""
    @property
    def ends(self) -> int: ...
    @property
    def problem(self) -> str:
        """Why this is no worker's certificate; empty if it is one."""
    @property
    def uri(self) -> str:
        """The worker's name: the certificate's only alternative name."""
    @property
    def world(self) -> int | None: ...
    @property
    def states_constraints(self) -> bool:
        """Whether it has the extension basic constraints."""
    @property
    def is_authority(self) -> bool: ...
    @property
    def foreign(self) -> bytes:
        """The whole certificate if its key or extensions are not as sealring issues them."""
    @property
    def key(self) -> str:
        """SHA-256 of its public key (SubjectPublicKeyInfo), in hexadecimal."""

def read_certificate(certificate: bytes) -> ReadCertificate:
    """Reads a certificate and does not ask who signed it."""

def read_certificates(
    certificates: tuple[bytes, ...], authorities: tuple[Authority, ...]
) -> list[ReadCertificate]:
    """Reads certificates, and the claims of those that one of the authorities has signed."""

def wrong_signatures(
    certificates: tuple[ReadCertificate, ...], signatures: tuple[bytes, ...], message: bytes
) -> list[int]:
    """Returns where a signature over the message is not by the certificate's key."""

def receive_now(descriptor: int, most: int, peek: bool = False) -> bytes | None:
    """Receives up to `most` bytes that a socket has, at most 16 KiB; None if it has none.

    Never waits, and keeps the interpreter's lock. With `peek` the bytes stay in the socket.
    """

MAX_STATEMENT_BYTES: int

def encode_bundle(entries: Mapping[int, bytes | bytearray], head: bytes) -> bytearray:
    """Returns `head` and then each entry after its rank and length, in the order of ranks."""

def parse_bundle(raw: Buffer, start: int) -> dict[int, bytearray]:
    """Returns the entries of the bundle from `start` on; ValueError if it is no bundle."""

FRAME_BYTES: int

class FrameSealer:
    """Seals one direction of a connection under a session, in frames of AES-256-GCM.

    Every frame begins with `start`. A frame's number is its nonce. Use after `wipe` raises
    RuntimeError, use in a forked child ForkedProcess.
    """
    def __init__(self, key: Secret, start: bytes) -> None: ...
    def seal(self, plain: Buffer) -> bytes:
        """Seals the bytes in as many frames as they need: one for each FRAME_BYTES."""
    def wipe(self) -> None: ...

class FrameOpener:
    """Receives and opens the frames of the peer's FrameSealer."""
    def __init__(self, key: Secret, start: bytes) -> None: ...
    def receive(self, descriptor: int) -> bytearray | None:
        """Returns the next frame's plaintext; None while the frame is incomplete. Never waits.

        Takes no byte after the frame. Raises OSError if the connection is cut, and ValueError if
        the bytes are no frame of the other end.
        """
    def wipe(self) -> None: ...

class Statements:
    """All members' statements, in the group's order; ValueError for bytes that are none.

    The members' contributions are in the memory for keys.
    """
    def __init__(self, encoded: tuple[Buffer, ...]) -> None: ...
    def rows(self) -> list[tuple[int, str, bytes, bytes, bytes, bytes, bool]]:
        """Each as (rank, instance, host, addresses, certificate, its SHA-256, contributes)."""
    def transcript(self, before: bytes) -> bytes:
        """SHA-256 over `before` and every statement's fields, each field after its length."""
    def first_wrong_value(self, before: bytes, shown: tuple[Buffer, ...]) -> int:
        """The place of the first value that does not fit its member's commitment; -1 if all fit.

        A commitment is SHA-256 over `before` and the value, after its length.
        """
    def group_secret(self, transcript: bytes, purpose: bytes, bytes: int) -> Secret:
        """Derives the group secret from all contributions, which are then wiped."""
