"""The broker on its ports: workers over TLS, the page on this host alone, and the chores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from sealring.attest.broker.issuing import SERVER_DAYS, issue_to_self
from sealring.attest.broker.keys import BrokerKeys
from sealring.attest.broker.refusals import response_of
from sealring.attest.broker.routes import page_routes, worker_routes
from sealring.attest.broker.service import Broker
from sealring.attest.broker.tls import answer, server_context
from sealring.errors import ConfigurationError, SealringError
from sealring.formats.http import Explain, Handle, Limits, Listener, PlainStream, Response, Stream

_LOG = logging.getLogger("sealring.attest.broker")
_SWEEP_SECONDS: Final = 30.0
_OWN_CERTIFICATE_SECONDS: Final = SERVER_DAYS * 86400 / 4


class Server:
    """The broker's TLS, and its page without it, over one listener."""

    def __init__(
        self, keys: BrokerKeys, names: Sequence[str], limits: Limits, explain: Explain
    ) -> None:
        self._keys = keys
        self._names = names
        self._listener = Listener(limits, explain)
        self.renew_own_certificate()

    def renew_own_certificate(self) -> None:
        self._context = server_context(*issue_to_self(self._keys, self._names))

    def listening(
        self, host: str, port: int, routes: Handle, *, tls: bool = True
    ) -> AbstractAsyncContextManager[int]:
        """Yields the port, which the system chooses if `port` is 0."""
        if tls:
            return self._listener.listening(host, port, routes, self._over_tls)
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigurationError(
                f"the page is served on this host's own address only, and {host} is not: look at "
                "it through `ssh -L`"
            )
        return self._listener.listening(host, port, routes, PlainStream)

    def _over_tls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        return answer(reader, writer, self._context)


@asynccontextmanager
async def serving(
    broker: Broker,
    keys: BrokerKeys,
    *,
    listen: tuple[str, int],
    page: tuple[str, int] | None,
    names: Sequence[str],
    limits: Limits,
    publish: Callable[[], object] | None = None,
) -> AsyncIterator[tuple[int, int | None]]:
    """A broker that answers; yields its port and its page's.

    `publish` shows the audit log to its readers and witnesses. It may take seconds.
    """
    _raise_descriptor_limit()
    await broker.open()

    def explain(error: SealringError, address: str, path: str) -> Response:
        if not error.audited:
            broker.strangers.note(error, address, time.time())
        return response_of(error, path)

    server = Server(keys, names, limits, explain)
    chores = asyncio.create_task(_chores(broker, server, publish))
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


async def _chores(broker: Broker, server: Server, publish: Callable[[], object] | None) -> None:
    renewed = time.monotonic()
    while True:
        if publish is not None:
            with _told():
                await asyncio.to_thread(publish)
        await asyncio.sleep(_SWEEP_SECONDS)
        with _told():
            while await broker.sweep():
                await asyncio.sleep(0)
        with _told():
            await broker.keep_refusals()
        if time.monotonic() - renewed > _OWN_CERTIFICATE_SECONDS:
            with _told():
                server.renew_own_certificate()
                renewed = time.monotonic()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A chore that fails, however it does, is told and done again: it does not end the others."""
    try:
        yield
    except Exception as error:
        _LOG.error("%s: %s", type(error).__name__, error)


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
