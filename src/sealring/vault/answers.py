"""Answers of a store that speaks S3 are received no further than they can be long.

Without this, its client collects in memory whatever comes until the request's time has passed: a
whole file where a proxy does not serve ranges, and gigabytes where an answer does not end.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any, Final

from sealring.errors import StoreFailed

_OVERHEAD: Final = 16 << 20
"""Bytes: a page of a listing, or an error, is much shorter."""
wanted: ContextVar[int] = ContextVar("wanted", default=0)
"""Bytes of content that the request asks for."""


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
        answer.content = _Content(answer, wanted.get() + _OVERHEAD)
        return answer


class _Content:
    """aiohttp's reader of one answer's body."""

    def __init__(self, answer: Any, longest: int) -> None:
        self._answer, self._reader, self._longest = answer, answer.content, longest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self, size: int = -1) -> bytes:
        if size >= 0:
            return bytes(await self._reader.read(size))
        came = bytearray()
        while block := await self._reader.readany():
            came += block
            if len(came) > self._longest:
                self._answer.close()
                raise StoreFailed(f"an answer has more than {self._longest} bytes")
        return bytes(came)
