"""The broker on its ports: connections counted, timed, and each answered for itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from OpenSSL import SSL

from sealring.broker.bodies import Bodies
from sealring.broker.http import (
    Explain,
    Handle,
    Limits,
    PlainStream,
    Request,
    Response,
    Stream,
    serve_connection,
)
from sealring.broker.issuing import SERVER_DAYS, issue_to_self
from sealring.broker.keys import BrokerKeys
from sealring.broker.rates import Rates
from sealring.broker.refusals import response_of
from sealring.broker.routes import page_routes, worker_routes
from sealring.broker.service import Broker
from sealring.broker.tls import answer, server_context
from sealring.errors import (
    ConfigurationError,
    SealringError,
    StoreUnavailable,
    TamperedStore,
    TooManyRequests,
)

_LOG = logging.getLogger("sealring.broker")
_BACKLOG: Final = 2048
_SWEEP_SECONDS: Final = 30.0
_OWN_CERTIFICATE_SECONDS: Final = SERVER_DAYS * 86400 / 4


class Server:
    """Serves one table of routes at one address."""

    def __init__(
        self, keys: BrokerKeys, names: Sequence[str], limits: Limits, explain: Explain
    ) -> None:
        self._keys = keys
        self._names = names
        self._limits = limits
        self._explain = explain
        self._rates = Rates(limits.requests_per_second, limits.burst)
        self._bodies = Bodies(limits.all_body_bytes)
        self._open: Counter[str] = Counter()
        self._streams: set[Stream] = set()
        self.renew_own_certificate()

    def renew_own_certificate(self) -> None:
        self._context = server_context(*issue_to_self(self._keys, self._names))

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, routes: Handle, *, tls: bool = True
    ) -> AsyncIterator[int]:
        """Yields the port, which the system chooses if `port` is 0."""
        if not tls and host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigurationError(
                f"the page is served on this host's own address only, and {host} is not: look at "
                "it through `ssh -L`"
            )

        async def limited(request: Request) -> Response:
            if not self._rates.allow(request.address, time.monotonic()):
                raise TooManyRequests("too many requests from this address: come again later")
            return await _guarded(routes, request)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = answer(reader, writer, self._context) if tls else PlainStream(reader, writer)
            address = str((writer.get_extra_info("peername") or ("gone",))[0])
            await self._serve(stream, address, limited)

        try:
            server = await asyncio.start_server(connected, host, port, backlog=_BACKLOG)
        except OSError as problem:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {problem}") from None
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            # Idle clients do not delay the stop.
            for stream in list(self._streams):
                stream.abort()

    async def _serve(self, stream: Stream, address: str, routes: Handle) -> None:
        full = self._open.total() >= self._limits.connections
        if full or self._open[address] >= self._limits.connections_per_address:
            stream.abort()
            return
        self._open[address] += 1
        self._streams.add(stream)
        try:
            await serve_connection(
                stream, address, self._limits, self._bodies, routes, self._explain
            )
        except (TimeoutError, OSError, SSL.Error):
            stream.abort()  # slow, gone, or no TLS at all: there is no one to tell
        except asyncio.CancelledError:
            stream.abort()
        finally:
            self._streams.discard(stream)
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
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


@asynccontextmanager
async def serving(
    broker: Broker,
    keys: BrokerKeys,
    *,
    listen: tuple[str, int],
    page: tuple[str, int] | None,
    names: Sequence[str],
    limits: Limits,
) -> AsyncIterator[tuple[int, int | None]]:
    """A broker that answers; yields its port and its page's."""
    _raise_descriptor_limit()

    def explain(error: SealringError, address: str, path: str) -> Response:
        if not error.audited:
            broker.strangers.note(error, address, time.time())
        return response_of(error, path)

    server = Server(keys, names, limits, explain)
    chores = asyncio.create_task(_chores(broker, server))
    try:
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(server.listening(*listen, worker_routes(broker)))
            page_port = None
            if page is not None:
                page_port = await stack.enter_async_context(
                    server.listening(*page, page_routes(broker), tls=False)
                )
            yield port, page_port
    finally:
        chores.cancel()
        with contextlib.suppress(SealringError):
            await broker.keep_refusals()
        broker.close()


async def _chores(broker: Broker, server: Server) -> None:
    renewed = time.monotonic()
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            while await broker.sweep():
                await asyncio.sleep(0)
            await broker.keep_refusals()
        except SealringError as error:
            _LOG.error("%s: %s", type(error).__name__, error)
        if time.monotonic() - renewed > _OWN_CERTIFICATE_SECONDS:
            server.renew_own_certificate()
            renewed = time.monotonic()


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
