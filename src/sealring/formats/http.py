"""A small HTTP/1.1 server, with a limit on everything that the other side chooses.

Connections are counted and timed, the requests of one address are limited, and an error in one
request does not affect others. The caller provides TLS, if there is any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from OpenSSL import SSL

from sealring.errors import (
    BrokerUnavailable,
    ConfigurationError,
    MalformedRequest,
    SealringError,
    TamperedStore,
    named,
)
from sealring.formats.bounded_connections import BoundedConnections, source_of

try:
    import h11
except ImportError:
    raise ConfigurationError(
        "brokers, witnesses, and workers that join through a broker need the package h11: "
        "pip install 'sealring[broker]'",
        code="configuration.missing_extra",
    ) from None

_LOG = logging.getLogger("sealring.http")
_NO_STORE: Final = "broker.store_unavailable"
_BACKLOG: Final = 2048
_TURNS: Final = 3
"""Turns of asyncio's loop until a connection that it has just accepted becomes a stream."""
_CHUNK: Final = 64 << 10
_ADDRESSES: Final = 1 << 16
"""The most addresses remembered. The one that has not asked for the longest time is dropped."""


class HttpStream(Protocol):
    async def handshake(self) -> None: ...
    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class PlainStream:
    """A stream without TLS, for pages that never leave this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def handshake(self) -> None:
        pass

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int = 4096
    connections_per_address: int = 2048
    head_bytes: int = 16 << 10
    body_bytes: int = 576 << 10
    """Room for a worker's evidence, of at most 512 KiB, and the rest of its request."""
    all_body_bytes: int = 32 << 20
    """The bytes of all unanswered requests together (`Bodies`)."""
    request_seconds: float = 15.0
    """The limit for the TLS handshake, and for each request from its first byte to its last."""
    idle_seconds: float = 30.0
    answer_seconds: float = 30.0
    """The limit for a client to take an answer."""
    requests_per_second: float = 200.0
    burst: int = 4000


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Handle = Callable[[Request], Awaitable[Response]]
Explain = Callable[[SealringError, str, str], Response]
"""Makes the answer to a refused request, from the error, the client's address and the path."""
MakeStream: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], HttpStream]


@dataclass(eq=False, slots=True)
class _Open:
    stream: HttpStream
    address: str
    source: str
    waiting_since: float | None = None


class HttpListener:
    """Serves tables of routes, each at its own address, with common limits."""

    def __init__(self, limits: ServerLimits, explain: Explain) -> None:
        self._limits = limits
        self._explain = explain
        self._rates = Rates(limits.requests_per_second, limits.burst)
        self._bodies = Bodies(limits.all_body_bytes)
        self._open: BoundedConnections[_Open] = BoundedConnections(
            limits.connections, limits.connections_per_address
        )
        self._streams: dict[asyncio.Future[None], HttpStream] = {}

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, routes: Handle, make_stream: MakeStream
    ) -> AsyncIterator[int]:
        """Yields the port. The system chooses it if `port` is 0."""

        async def limited(request: Request) -> Response:
            if not self._rates.allow(source_of(request.address), time.monotonic()):
                raise BrokerUnavailable(
                    "too many requests from this address: come again later",
                    code="broker.too_many_requests",
                )
            return await _guarded(routes, request)

        # Not a coroutine: if one were cancelled before it runs, its connection would stay open.
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("peername")
            if peer is None or not self._make_room(source_of(peer[0])):
                writer.transport.abort()
                return
            try:
                stream = make_stream(reader, writer)
            except BaseException:
                writer.transport.abort()
                raise
            one = _Open(stream, peer[0], source_of(peer[0]))
            self._open.add(one, time.monotonic())
            task = asyncio.ensure_future(self._serve(one, limited))
            task.add_done_callback(lambda _: self._open.remove(one))
            self._streams[task] = stream
            task.add_done_callback(self._streams.pop)

        try:
            server = await asyncio.start_server(connected, host, port, backlog=_BACKLOG)
        except OSError as problem:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {problem}") from None
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            # Otherwise a connection that was accepted but is no stream yet would stay open.
            for each in server.sockets:
                asyncio.get_running_loop().remove_reader(each.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            server.close()
            # Idle clients do not delay the stop.
            for stream in list(self._streams.values()):
                stream.abort()
            await asyncio.sleep(0)  # lets the streams close

    def _make_room(self, source: str) -> bool:
        """Closes a connection if necessary. False if all are being served or are too new."""
        if self._open.has_room(source):
            return True
        oldest = self._open.to_give_way(source, time.monotonic())
        if oldest is None:
            return False
        self._open.serve(oldest)  # so that it is chosen only once; its task ends with its stream
        oldest.stream.abort()
        return True

    async def _serve(self, one: _Open, routes: Handle) -> None:
        stream = one.stream

        async def served(request: Request) -> Response:
            self._open.serve(one)
            try:
                return await routes(request)
            finally:
                self._open.wait_for(one, time.monotonic())

        try:
            await serve_connection(
                stream, one.address, self._limits, self._bodies, served, self._explain
            )
        except (TimeoutError, OSError, SSL.Error):
            stream.abort()  # slow, gone or without TLS: no answer would arrive
        except asyncio.CancelledError:
            stream.abort()
        finally:
            stream.close()


async def _guarded(routes: Handle, request: Request) -> Response:
    """Handles a request. An unexpected error goes to the log, and the client is not told."""
    try:
        return await routes(request)
    except SealringError as error:
        if isinstance(error, ConfigurationError | TamperedStore) or error.code == _NO_STORE:
            _LOG.error("%s: %s", named(error), error)
        raise
    except Exception as problem:
        _LOG.exception("a request failed")
        raise SealringError("a request failed") from problem


# ---- one connection


async def serve_connection(
    stream: HttpStream,
    address: str,
    limits: ServerLimits,
    bodies: Bodies,
    handle: Handle,
    explain: Explain,
) -> None:
    """Answers requests until the client goes, is too slow, or makes a mistake."""
    async with asyncio.timeout(limits.request_seconds):
        await stream.handshake()
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
    while True:
        if not http.trailing_data[0]:  # no part of the next request came with the last one
            async with asyncio.timeout(limits.idle_seconds):
                first = await stream.read()
            if not first:
                return
            http.receive_data(first)
        body = bodies.open(address, stream.abort)
        path = ""
        try:
            async with asyncio.timeout(limits.request_seconds):
                request = await _receive_request(stream, http, body, limits)
            path = request.path
            response = await handle(request)
        except TimeoutError:
            late = BrokerUnavailable(
                "the request did not come whole in time", code="broker.request_too_slow"
            )
            response = explain(late, address, path)
        except h11.RemoteProtocolError as problem:
            error = MalformedRequest(f"that is not HTTP/1.1: {problem}")
            response = explain(error, address, path)
        except SealringError as refusal:
            response = explain(refusal, address, path)
        finally:
            body.close()
        async with asyncio.timeout(limits.answer_seconds):
            await _send_response(stream, http, response)
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return
        http.start_next_cycle()


async def _receive_request(
    stream: HttpStream, http: h11.Connection, body: Body, limits: ServerLimits
) -> Request:
    head: h11.Request | None = None
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await stream.read()
            if not data:
                raise MalformedRequest("the request ends before its end")
            http.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body.add(event.data)
            if len(body.content) > limits.body_bytes:
                raise MalformedRequest(
                    f"a request has at most {limits.body_bytes} bytes",
                    code="broker.request_too_large",
                )
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
            }
            return Request(
                head.method.decode("latin-1"),
                head.target.decode("latin-1"),
                headers,
                body.finish(),
                body.address,
            )
        else:
            raise MalformedRequest("the connection ends here")


async def _send_response(stream: HttpStream, http: h11.Connection, response: Response) -> None:
    headers = {
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **response.headers,
    }
    if http.their_state is not h11.DONE:
        headers["connection"] = "close"
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    event = h11.Response(status_code=response.status, headers=list(headers.items()))
    data = http.send(event) or b""
    data += http.send(h11.Data(data=response.body)) or b""
    data += http.send(h11.EndOfMessage()) or b""
    await stream.write(data)


# ---- what all connections share


class Body:
    """The bytes of one request, as they arrive."""

    def __init__(self, bodies: Bodies, address: str, drop: Callable[[], None]) -> None:
        self._bodies, self.address, self.drop = bodies, address, drop
        self.source = source_of(address)
        self.content = bytearray()
        self.finished = False
        self.dropped = False

    def add(self, data: bytes) -> None:
        self.content += data
        self._bodies.grown(self, len(data))
        if self.dropped:
            raise BrokerUnavailable(
                "unfinished requests took too much memory: come again later",
                code="broker.too_many_requests",
            )

    def finish(self) -> bytes:
        """The whole body. Its memory counts until `close`."""
        self.finished = True
        return bytes(self.content)

    def close(self) -> None:
        self._bodies.close(self)


class Bodies:
    """Bounds the memory of all requests that are not answered yet, over all connections.

    If they would take more than the limit, the source that holds most of it loses its oldest
    unfinished request. So a flood of half-sent requests ends its own requests, and workers at other
    addresses are still served.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[Body, int] = {}
        """How many bytes each body holds, in the order in which the requests began."""
        self._held: Counter[str] = Counter()

    def open(self, address: str, drop: Callable[[], None]) -> Body:
        """Opens a body. `drop` ends the connection if its memory is needed."""
        body = Body(self, address, drop)
        self._open[body] = 0
        return body

    def grown(self, body: Body, more: int) -> None:
        if body not in self._open:
            return
        self._open[body] += more
        self._held[body.source] += more
        while self._held.total() > self._limit:
            unfinished = [each for each, held in self._open.items() if held and not each.finished]
            if not unfinished:
                return
            # Of the source that holds most, the oldest: max() returns the first.
            victim = max(unfinished, key=lambda each: self._held[each.source])
            victim.dropped = True
            self.close(victim)
            victim.drop()

    def close(self, body: Body) -> None:
        held = self._open.pop(body, None)
        if held is None:
            return
        body.content = bytearray()
        self._held[body.source] -= held
        if not self._held[body.source]:
            del self._held[body.source]


class Rates:
    """Limits the requests of each address: a token bucket that fills at a steady rate."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, address: str, now: float) -> bool:
        left, then = self._buckets.pop(address, (float(self._burst), now))
        left = min(self._burst, left + (now - then) * self._per_second)
        allowed = left >= 1
        self._buckets[address] = (left - allowed, now)
        if len(self._buckets) > _ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed
