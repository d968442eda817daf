"""Answers of a store that speaks S3 are received no further than they can be long.

Without this, its client collects in memory whatever comes until the request's time has passed: a
whole file where a proxy does not serve ranges, and gigabytes where an answer does not end.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from sealring.errors import StoreFailed

_OVERHEAD: Final = 16 << 20
"""Bytes: a page of a listing, or an error, is much shorter."""
LARGEST_LISTING: Final = 64 << 20
"""Bytes, of the answers that list files: for about 200,000 of them."""


@dataclass(slots=True)
class Room:
    """What the answers to one call of the client may hold: it may need several requests."""

    wanted: int
    """Bytes of content that each request asks for."""
    listing: bool
    """The pages of a listing count together: a store can always say that another one follows."""
    came: int = 0

    def take(self, answer: int, count: int) -> None:
        """`answer`: bytes of the answer that these are the last `count` of."""
        self.came += count
        if answer > (longest := self.wanted + _OVERHEAD):
            raise StoreFailed(f"an answer has more than {longest} bytes")
        if self.listing and self.came > (longest := LARGEST_LISTING + _OVERHEAD):
            raise StoreFailed(f"the answers to one question have more than {longest} bytes")


room: ContextVar[Room | None] = ContextVar("room", default=None)


def options_of(url: str) -> dict[str, Any]:
    """What fsspec gives to s3fs, which gives it to its client."""
    if not url.startswith(("s3://", "s3a://")):
        return {}
    import fsspec

    try:
        from aiobotocore.config import AioConfig
    except ImportError:
        return {}  # fsspec says what to install
    if "http_session_cls" not in inspect.signature(AioConfig.__init__).parameters:
        return {}  # an older one
    chosen = dict(fsspec.config.conf.get("s3", {}).get("config_kwargs") or {})
    chosen.setdefault("http_session_cls", _session_class())
    return {"config_kwargs": chosen}


@functools.cache
def _session_class() -> type:
    """Always the same: fsspec knows a connection that it has by its options."""
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
        async def _get_session(self, *args: Any, **options: Any) -> Any:
            return _Requests(await super()._get_session(*args, **options))

    return Session


class _Requests:
    """aiohttp's session, whose answers are bounded."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> Any:
        answer = await self._session.request(*args, **options)
        answer.content = _Content(answer, room.get() or Room(0, listing=False))
        return answer


class _Content:
    """aiohttp's reader of one answer's body."""

    def __init__(self, answer: Any, allowed: Room) -> None:
        self._answer, self._reader, self._room = answer, answer.content, allowed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self, size: int = -1) -> bytes:
        if size >= 0:
            return bytes(await self._reader.read(size))
        came = bytearray()
        while block := await self._reader.readany():
            came += block
            try:
                self._room.take(len(came), len(block))
            except StoreFailed:
                self._answer.close()
                raise
        return bytes(came)
