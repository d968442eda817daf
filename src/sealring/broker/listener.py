"""A port: connections counted and timed, requests of one address limited, each answered alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from OpenSSL import SSL

from sealring.broker.bodies import Bodies
from sealring.broker.http import (
    Explain,
    Handle,
    Limits,
    Request,
    Response,
    Stream,
    serve_connection,
)
from sealring.broker.rates import Rates
from sealring.errors import (
    ConfigurationError,
    SealringError,
    StoreUnavailable,
    TamperedStore,
    TooManyRequests,
)
from sealring.formats.bounded_connections import BoundedConnections, source_of

_LOG = logging.getLogger("sealring.broker")
_BACKLOG: Final = 2048
_TURNS: Final = 3
"""Of asyncio's loop, in which a connection that it has just taken becomes a stream."""

MakeStream: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Stream]


@dataclass(eq=False, slots=True)
class _Open:
    stream: Stream
    address: str
    source: str
    waiting_since: float | None = None


class Listener:
    """Serves tables of routes, each at one address. The limits are for all of them together."""

    def __init__(self, limits: Limits, explain: Explain) -> None:
        self._limits = limits
        self._explain = explain
        self._rates = Rates(limits.requests_per_second, limits.burst)
        self._bodies = Bodies(limits.all_body_bytes)
        self._open: BoundedConnections[_Open] = BoundedConnections(
            limits.connections, limits.connections_per_address
        )
        self._streams: dict[asyncio.Future[None], Stream] = {}

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, routes: Handle, make_stream: MakeStream
    ) -> AsyncIterator[int]:
        """Yields the port, which the system chooses if `port` is 0."""

        async def limited(request: Request) -> Response:
            if not self._rates.allow(source_of(request.address), time.monotonic()):
                raise TooManyRequests("too many requests from this address: come again later")
            return await _guarded(routes, request)

        # Not a coroutine: one that is cancelled before it runs would leave its connection open.
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
            # A connection that is taken, and no stream yet when the server is closed, stays open.
            for each in server.sockets:
                asyncio.get_running_loop().remove_reader(each.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            server.close()
            # Idle clients do not delay the stop.
            for stream in list(self._streams.values()):
                stream.abort()
            await asyncio.sleep(0)  # in which they are closed

    def _make_room(self, source: str) -> bool:
        """False if all connections are served, or too new to give way."""
        if self._open.has_room(source):
            return True
        oldest = self._open.to_give_way(source, time.monotonic())
        if oldest is None:
            return False
        self._open.serve(oldest)  # it is chosen once; its task ends with its stream
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
            stream.abort()  # slow, gone, or no TLS at all: there is no one to tell
        except asyncio.CancelledError:
            stream.abort()
        finally:
            stream.close()


async def _guarded(routes: Handle, request: Request) -> Response:
    """Whatever goes wrong inside is the broker's own matter, and its log's."""
    try:
        return await routes(request)
    except SealringError as error:
        if isinstance(error, ConfigurationError | StoreUnavailable | TamperedStore):
            _LOG.error("%s: %s", type(error).__name__, error)
        raise
    except Exception as problem:
        _LOG.exception("a request failed")
        raise SealringError("a request failed") from problem
