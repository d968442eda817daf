"""A witness of transparency logs: its state, and its protocol (c2sp.org/tlog-witness).

STATE/<SHA-256 of the origin>       the last checkpoint, with the log's signature and our own
STATE/<...>.refused                 a checkpoint that the log signed with another root for the
                                    same size: together with the last one, proof of a fork

A witness makes one promise: it never cosigns two checkpoints of one log that contradict each other.
So the check and the write are one step under a lock, and the write is durable before the
cosignature is sent. State in memory does not go back while the process runs. Times do not go back
either, whatever the clock does: a cosignature says that no larger checkpoint was seen before.

There is no TLS here: a submission is public and signed by its log, and the answer is signed by the
witness. Put a proxy in front if clients expect https. The HTTP server needs the extra `broker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from sealring.errors import (
    ConfigurationError,
    ForgedStatement,
    LogError,
    MalformedStatement,
    SealringError,
    TamperedLog,
)
from sealring.formats.files import DurableFiles, locked, read_limited, writing
from sealring.formats.http import HttpListener, PlainStream, Request, Response, ServerLimits
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import (
    MAX_SUBMISSION_BYTES,
    PATH,
    SIZE_TYPE,
    SignedCheckpoint,
    open_checkpoint,
    origin_digest,
    parse_submission,
)
from sealring.formats.log.notes import (
    MAX_NOTE_BYTES,
    Note,
    SignatureKind,
    Signer,
    verified,
    with_signatures,
)
from sealring.formats.log.policy import LogPolicy

# ---- what was cosigned


_LOG = logging.getLogger("sealring.record.witness")


class OtherSize(LogError):
    """The client expects the witness to be at another size. The answer is the right size."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the last checkpoint that was cosigned here has {size} entries")
        self.size = size


class WitnessState:
    """A witness's checkpoints, on disk and in memory. Thread-safe."""

    def __init__(
        self, folder: Path, signer: Signer, policy: LogPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`policy` lists the logs. Its witnesses and quorum are not used."""
        if signer.kind is not SignatureKind.COSIGNATURE:
            raise ConfigurationError(
                f"the key of {signer.name} is a log's: `sealring audit init --witness` makes a "
                "witness's"
            )
        if not policy.logs:
            raise ConfigurationError("the policy lists no log to witness")
        self._folder = folder
        self._signer = signer
        self._policy = LogPolicy(policy.logs)
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, SignedCheckpoint] = {}
        self._times: dict[str, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with writing(self._folder, "made"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # Two witnesses with the same key and state could together cosign two views.
            stack.enter_context(locked(self._folder))
            DurableFiles(self._folder).clear()
            for origin in sorted({log.verifier.name for log in self._policy.logs}):
                self._load(origin)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def logs(self) -> Iterator[tuple[str, int]]:
        """Each log's origin, and the number of entries in its last cosigned checkpoint."""
        for origin in sorted({log.verifier.name for log in self._policy.logs}):
            last = self._last.get(origin)
            yield origin, last.size if last else 0

    def add_checkpoint(self, body: bytes) -> bytes:
        """Cosigns a checkpoint that continues the last one. Returns the signature line."""
        submission = parse_submission(body)
        signed = open_checkpoint(submission.checkpoint, self._policy)
        if submission.old > signed.size:
            raise MalformedStatement(
                f"the old size is {submission.old}, and the checkpoint has {signed.size} entries",
                code="log.malformed_note",
            )
        with self._lock:
            last = self._last.get(signed.checkpoint.origin)
            size, root = (last.size, last.root) if last else (0, tree.EMPTY_ROOT)
            if submission.old != size:
                raise OtherSize(size)
            if last and signed.size == size and signed.root != root:
                self._keep_refused(signed)
            tree.check_consistency(size, root, signed.size, signed.root, submission.proof)
            return self._cosign(signed)

    def seen(self, digest: str) -> bytes | None:
        """The last checkpoint of the log whose origin has this SHA-256."""
        with self._lock:
            for origin, last in self._last.items():
                if origin_digest(origin) == digest:
                    return last.note.encode()
        return None

    def _cosign(self, signed: SignedCheckpoint) -> bytes:
        # Only the log's own signatures are kept, as the witness does not vouch for others. At most
        # one is kept per key, as anyone can send a checkpoint with one signature many times.
        origin, text = signed.checkpoint.origin, signed.note.text
        keys = self._policy.keys_of(origin)
        lines = [line for line in signed.note.lines if any(key.signed(line) for key in keys)]
        time = max(int(self._clock()), self._times.get(origin, 0))
        line = self._signer.sign(text, time)
        note = with_signatures(Note(text, ()), [*lines, line]).encode()
        # Read it before it is written: a file that cannot be read would stop the whole witness.
        last = open_checkpoint(note, self._policy)
        self._write(origin_digest(origin), note)
        self._last[origin], self._times[origin] = last, time
        return line.encode().encode()

    def _keep_refused(self, signed: SignedCheckpoint) -> None:
        """Keeps a proof of a fork, which two checkpoints of one size are. One proof is enough."""
        name = f"{origin_digest(signed.checkpoint.origin)}.refused"
        if not (self._folder / name).exists():
            _LOG.error(
                "the log %s signed two roots for %d entries: %s proves it",
                signed.checkpoint.origin, signed.size, self._folder / name,
            )  # fmt: skip
            self._write(name, signed.note.encode())

    def _write(self, name: str, content: bytes) -> None:
        batch = DurableFiles(self._folder)
        with writing(f"the witness's state in {self._folder}"):
            batch.write(name, content)
            batch.sync()

    def _load(self, origin: str) -> None:
        path = self._folder / origin_digest(origin)
        content = read_limited(path, MAX_NOTE_BYTES)
        if content is None:
            return
        try:
            signed = open_checkpoint(content, self._policy)
            own = verified(signed.note, [self._signer.verifier])
        except (ForgedStatement, MalformedStatement) as problem:
            raise TamperedLog(f"{path} is not what this witness wrote: {problem}") from None
        if not own or signed.checkpoint.origin != origin:
            raise TamperedLog(f"{path} is not what this witness wrote: restore it from a copy")
        self._last[origin], self._times[origin] = signed, own[self._signer.verifier]


# ---- HTTP


LIMITS: Final = ServerLimits(
    connections=1024, connections_per_address=128, body_bytes=MAX_SUBMISSION_BYTES,
    all_body_bytes=16 << 20, requests_per_second=50.0, burst=500,
)  # fmt: skip
_TEXT: Final = "text/plain; charset=utf-8"
_SEEN: Final = re.compile(r"/([0-9a-f]{64})/checkpoint")
_STATUS: Final = {
    "log.malformed_note": 400,
    "broker.malformed_request": 400,
    "log.forged_note": 403,
    "log.wrong": 404,
    "broker.request_too_slow": 408,
    "broker.request_too_large": 413,
    "log.forked_log": 422,
    "broker.too_many_requests": 429,
}


@asynccontextmanager
async def serving(
    state: WitnessState, host: str, port: int, limits: ServerLimits = LIMITS
) -> AsyncIterator[int]:
    """Runs a witness that answers requests. Yields its port."""
    listener = HttpListener(limits, lambda error, address, path: _refusal(error))

    async def routes(request: Request) -> Response:
        return await _answer(state, request)

    async with listener.listening(host, port, routes, PlainStream) as found:
        yield found


async def _answer(state: WitnessState, request: Request) -> Response:
    if request.path == PATH:
        if request.method != "POST":
            return Response(405, b"POST a checkpoint here\n", _TEXT, {"allow": "POST"})
        # In a thread, because the state is written to the disk before the answer.
        return Response(200, await asyncio.to_thread(state.add_checkpoint, request.body), _TEXT)
    if (match := _SEEN.fullmatch(request.path)) and request.method == "GET":
        if (seen := state.seen(match[1])) is not None:
            return Response(200, seen, _TEXT)
        return Response(404, b"this witness has cosigned no checkpoint of that log\n", _TEXT)
    return Response(404, b"there is nothing here\n", _TEXT)


def _refusal(error: SealringError) -> Response:
    if isinstance(error, OtherSize):
        return Response(409, f"{error.size}\n".encode(), SIZE_TYPE)
    status = _STATUS.get(error.code)
    if status is None:  # an internal fault, which is in the witness's log
        return Response(500, b"the witness cannot answer now\n", _TEXT)
    return Response(status, f"{error}\n".encode("utf-8", "replace"), _TEXT)
