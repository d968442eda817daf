"""The witness protocol over HTTP (c2sp.org/tlog-witness).

There is no TLS here: a submission is public and signed by its log, the answer by the witness. Put
a proxy in front where clients expect https.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sealring.errors import (
    ForgedNote,
    ForkedLog,
    MalformedNote,
    MalformedRequest,
    RequestTooLarge,
    RequestTooSlow,
    SealringError,
    TooManyRequests,
    WrongLog,
)
from sealring.formats.http import Limits, Listener, PlainStream, Request, Response
from sealring.formats.log.checkpoints import MAX_SUBMISSION_BYTES, PATH, SIZE_TYPE
from sealring.record.witness.state import OtherSize, WitnessState

LIMITS: Final = Limits(
    connections=1024, connections_per_address=128, body_bytes=MAX_SUBMISSION_BYTES,
    all_body_bytes=16 << 20, requests_per_second=50.0, burst=500,
)  # fmt: skip
_TEXT: Final = "text/plain; charset=utf-8"
_SEEN: Final = re.compile(r"/([0-9a-f]{64})/checkpoint")
_STATUS: Final[dict[type[SealringError], int]] = {
    MalformedNote: 400,
    MalformedRequest: 400,
    ForgedNote: 403,
    WrongLog: 404,
    RequestTooSlow: 408,
    OtherSize: 409,
    RequestTooLarge: 413,
    ForkedLog: 422,
    TooManyRequests: 429,
}


@asynccontextmanager
async def serving(
    state: WitnessState, host: str, port: int, limits: Limits = LIMITS
) -> AsyncIterator[int]:
    """A witness that answers; yields its port."""
    listener = Listener(limits, lambda error, address, path: _refusal(error))

    async def routes(request: Request) -> Response:
        return await _answer(state, request)

    async with listener.listening(host, port, routes, PlainStream) as found:
        yield found


async def _answer(state: WitnessState, request: Request) -> Response:
    if request.path == PATH:
        if request.method != "POST":
            return Response(405, b"POST a checkpoint here\n", _TEXT, {"allow": "POST"})
        # In a thread: the state is written to the disk before the answer.
        return Response(200, await asyncio.to_thread(state.add_checkpoint, request.body), _TEXT)
    if (match := _SEEN.fullmatch(request.path)) and request.method == "GET":
        if (seen := state.seen(match[1])) is not None:
            return Response(200, seen, _TEXT)
        return Response(404, b"this witness has cosigned no checkpoint of that log\n", _TEXT)
    return Response(404, b"there is nothing here\n", _TEXT)


def _refusal(error: SealringError) -> Response:
    if isinstance(error, OtherSize):
        return Response(409, f"{error.size}\n".encode(), SIZE_TYPE)
    status = _STATUS.get(type(error))
    if status is None:  # the witness's own trouble, which is in its log
        return Response(500, b"the witness cannot answer now\n", _TEXT)
    return Response(status, f"{error}\n".encode("utf-8", "replace"), _TEXT)
