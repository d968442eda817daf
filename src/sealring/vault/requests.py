"""Requests to a store through its fsspec client, and the checks of the store's answers.

Each request ends in bounded time. Until then a client collects in memory whatever arrives: a whole
file if a proxy does not serve ranges, or gigabytes if an answer does not end. Clients follow
redirects to any address, with the request's body and the session's token. fsspec's HTTP client
calls a file absent whenever it cannot be read. So this module checks each answer as it arrives.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from sealring.errors import ConfigurationError, SealringError, StoreFailed, Unsupported
from sealring.vault.sealed import shown

SILENT_SECONDS: Final = 120.0
"""How long a request may take, with its client's repetitions, plus time for its size."""
_BYTES_A_SECOND: Final = 1 << 18
_STOP_SECONDS: Final = 5.0
"""How long a stopped request may take to end: it only closes its connection."""
_MOVES_CONTENT: Final = frozenset({"cat_file", "pipe_file", "put_file"})
OVERHEAD: Final = 16 << 20
"""The most bytes of an answer beyond its content: a listing's page or an error is much shorter."""
LARGEST_LISTING: Final = 64 << 20
"""The most bytes of all answers that list files: enough for about 200,000 files."""
_ABSENT: Final = frozenset({404, 410})
_CONTENT: Final = frozenset({200, 206})
"""Statuses of answers that hold what was asked for."""
_READING: Final = frozenset({"GET", "HEAD"})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_S3: Final = frozenset({"s3", "s3a"})
HTTP: Final = frozenset({"http", "https"})
OF_THIS_MACHINE: Final = frozenset({"file", "local", "memory"})
_LONGEST_ADDRESS: Final = 100


@dataclass(slots=True)
class Room:
    """Limits the answers to one call of the client, which may need several requests."""

    wanted: int
    """The bytes of content that each request asks for."""
    listing: bool
    """Whether the answers count together: a store can always say that another page follows."""
    absent: frozenset[int] = _ABSENT
    """Statuses after which the client is believed when it says that a file is absent."""
    came: int = 0
    status: int | None = None
    """The status of the last request's answer; None if there was no answer."""
    elsewhere: str = ""
    """Where that answer sends the client, if that is another address."""

    def asked(self) -> None:
        self.status, self.elsewhere = None, ""

    def answered(self, answer: Any) -> None:
        self.status, self.elsewhere = answer.status, _other_address(answer)
        # Clients take other statuses below 300 for success too, and the answer for an empty file.
        if answer.method in _READING and answer.status < 300 and answer.status not in _CONTENT:
            _refuse(answer)
        answer.content = _Content(answer, self)

    def judged(self, url: str, problem: Exception) -> Exception:
        """The error to raise for a failed call. Only this method decides that a file is absent."""
        if self.elsewhere:
            return StoreFailed(
                f"{url} redirects to {self.elsewhere}, and nothing is sent there. If the store has "
                "moved, use its new URL"
            )
        if isinstance(problem, SealringError):
            return problem
        if isinstance(problem, FileNotFoundError):
            if self.status in self.absent:
                return problem
            return problem.__cause__ if isinstance(problem.__cause__, Exception) else _no_word()
        return FileNotFoundError(url) if self.status in _ABSENT else problem

    def take(self, answer: int, count: int) -> None:
        """Counts `count` more bytes of an answer that now has `answer` bytes in all.

        Raises StoreFailed if they are too many.
        """
        self.came += count
        if answer > (longest := self.wanted + OVERHEAD):
            raise StoreFailed(f"an answer has more than {longest} bytes")
        if self.listing and self.came > (longest := LARGEST_LISTING + OVERHEAD):
            raise StoreFailed(f"the answers to one question have more than {longest} bytes")


room: ContextVar[Room | None] = ContextVar("room", default=None)


def _proving_absence(files: Any) -> frozenset[int]:
    """The statuses that prove absence. S3 lists an absent folder with success, as empty."""
    return _ABSENT | {200} if _S3.intersection(files.protocol) else _ABSENT


def options_of(url: str) -> dict[str, Any]:
    """The options with which fsspec makes a client whose answers this module checks."""
    scheme = url.partition("://")[0]
    if scheme in OF_THIS_MACHINE:
        return {}
    if scheme not in _S3 | HTTP:
        raise Unsupported(
            f"no vault is used in a store of the kind {scheme[:20]!r}: its client may call a file "
            "absent that it could not read, and an older version would be taken. Use s3://, "
            "http://, https:// or a directory"
        )
    import fsspec

    watching: Any
    try:
        if scheme in HTTP:
            import aiohttp

            _require(aiohttp.ClientSession, "middlewares")
            option, name, watching = "client_kwargs", "middlewares", (_follow_inside,)
        else:
            from aiobotocore.config import AioConfig

            _require(AioConfig, "http_session_cls")
            option, name, watching = "config_kwargs", "http_session_cls", _session_class()
    except ImportError:
        return {}  # fsspec says what to install
    chosen: dict[str, Any] = {}
    for one in sorted(HTTP if scheme in HTTP else _S3):
        chosen |= fsspec.config.conf.get(one, {}).get(option) or {}
    return {option: {**chosen, name: watching}}


def _require(client: Any, parameter: str) -> None:
    if parameter not in inspect.signature(client.__init__).parameters:
        raise ConfigurationError(
            f"this {client.__module__.partition('.')[0]} is too old for stores: "
            "pip install --upgrade 'sealring[stores]' aiohttp aiobotocore",
            code="configuration.missing_extra",
        )


def _other_address(answer: Any) -> str:
    """The scheme, host and port of a redirect if they differ from the request's; else empty."""
    if not (target := _target(answer)):
        return ""
    try:
        origin = answer.url.join(type(answer.url)(target)).origin()
    except ValueError:
        return "no address"
    if origin == answer.url.origin():
        return ""
    return shown(str(origin), _LONGEST_ADDRESS)


def _refuse(answer: Any) -> NoReturn:
    answer.close()
    raise StoreFailed(f"{answer.url} cannot be used: the server answers {answer.status}")


def _target(answer: Any) -> str:
    """The address to which an answer redirects the client; empty if it does not."""
    found = answer.headers.get("Location") or answer.headers.get("URI") or ""
    return str(found) if answer.status in _REDIRECTS else ""


def _no_word() -> OSError:
    return OSError("no answer says whether the file is there")


async def _follow_inside(request: Any, send: Any) -> Any:
    """An aiohttp middleware, called for each request and again for each redirect."""
    allowed = room.get() or Room(0, listing=False)
    allowed.asked()
    answer = await send(request)
    allowed.answered(answer)
    if allowed.elsewhere:
        answer.close()
        raise StoreFailed(f"a redirect to {allowed.elsewhere}")
    if 300 <= answer.status < 400 and not _target(answer):
        _refuse(answer)
    return answer


@functools.cache
def _session_class() -> type:
    """A session class for aiobotocore, made once: fsspec finds a connection by equal options."""
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
        async def _get_session(self, *args: Any, **options: Any) -> Any:
            return _Requests(await super()._get_session(*args, **options))

    return Session


class _Requests:
    """Wraps aiohttp's session for aiobotocore. It follows no redirects; boto3 follows none too."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> Any:
        allowed = room.get() or Room(0, listing=False)
        allowed.asked()
        answer = await self._session.request(*args, allow_redirects=False, **options)
        allowed.answered(answer)
        return answer


class _Content:
    """Wraps aiohttp's reader of an answer's body, and stops an answer that is too long."""

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


def can_be_stopped(files: Any) -> bool:
    """Whether the client runs in fsspec's event loop, as clients of network stores do."""
    from fsspec.asyn import AsyncFileSystem

    return isinstance(files, AsyncFileSystem)


def ask(files: Any, url: str, size: int, method: str, *args: Any, **options: Any) -> Any:
    """Calls a method of the client for `size` bytes, and stops it if no answer comes in time.

    Clients repeat requests: s3fs waits more than six minutes for a server that says nothing. A
    request that goes on could still put a file after its caller has given up.
    """
    if not can_be_stopped(files):
        return getattr(files, method)(*args, **options)
    seconds = SILENT_SECONDS + size / _BYTES_A_SECOND

    async def bounded() -> Any:
        allowed = Room(size, listing=method not in _MOVES_CONTENT, absent=_proving_absence(files))
        room.set(allowed)
        try:
            return await asyncio.wait_for(getattr(files, f"_{method}")(*args, **options), seconds)
        except TimeoutError:
            raise StoreFailed(
                f"{url} did not answer within {seconds:.0f} seconds: try again later"
            ) from None
        except Exception as problem:
            if (meant := allowed.judged(url, problem)) is problem:
                raise
            raise meant from None

    return _run(files.loop, bounded())


def _run(loop: asyncio.AbstractEventLoop, request: Coroutine[Any, Any, Any]) -> Any:
    """Runs a request in fsspec's loop. Ctrl-C stops it; with fsspec's own `sync` it would go on."""
    ended = threading.Event()
    tasks: list[asyncio.Task[Any]] = []

    def begin() -> None:
        tasks.append(loop.create_task(request))
        tasks[0].add_done_callback(lambda _: ended.set())

    loop.call_soon_threadsafe(begin)
    try:
        ended.wait()
    except BaseException:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        ended.wait(_STOP_SECONDS)
        raise
    return tasks[0].result()


def condition_failed(problem: BaseException | None) -> bool:
    """Whether a store refused a request because its condition did not hold (HTTP status 412).

    s3fs itself recognises this only for stores that name the condition, as AWS does.
    """
    while problem is not None:
        answer = getattr(problem, "response", None)
        if isinstance(answer, dict):
            return answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412  # type: ignore[no-any-return]
        problem = problem.__cause__
    return False
