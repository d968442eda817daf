"""A port that is closed while clients connect, or that has more clients than it can serve."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sealring.errors import SealringError
from sealring.formats.bounded_connections import LEAST_SECONDS
from sealring.formats.http import Bodies, HttpListener, PlainStream, Request, Response, ServerLimits


async def _answer(_: Request) -> Response:
    return Response(200, b"{}")


def _explain(_: SealringError, __: str, ___: str) -> Response:
    return Response(500, b"{}")


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_comes_with_the_end_is_not_left_open(turns: int) -> None:
    async def serve() -> socket.socket:
        async with HttpListener(ServerLimits(), _explain).listening(
            "127.0.0.1", 0, _answer, PlainStream
        ) as port:
            client = socket.create_connection(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
            return client

    gc.disable()  # the collector would close what was left open
    try:
        with asyncio.run(serve()) as client:
            client.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    finally:
        gc.enable()


REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
FEW = ServerLimits(connections=8, connections_per_address=4)


@asynccontextmanager
async def _connected(port: int, address: str) -> AsyncIterator[PlainStream]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(address, 0)
    )  # fmt: skip
    try:
        yield PlainStream(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _flood(stack: contextlib.AsyncExitStack, port: int, addresses: list[str]) -> None:
    """Holds the most connections that each address may have, and sends nothing."""
    for address in addresses:
        for _ in range(FEW.connections_per_address):
            await stack.enter_async_context(_connected(port, address))
    await asyncio.sleep(2 * LEAST_SECONDS)


async def _ask(stream: PlainStream) -> bytes:
    await stream.write(REQUEST)
    return await stream.read()


@pytest.mark.threat("B9")
def test_strangers_at_two_addresses_do_not_keep_workers_out() -> None:
    async def attack() -> bytes:
        async with (
            HttpListener(FEW, _explain).listening("127.0.0.1", 0, _answer, PlainStream) as port,
            contextlib.AsyncExitStack() as stack,
        ):
            await _flood(stack, port, ["127.0.0.2", "127.0.0.3"])
            worker = await stack.enter_async_context(_connected(port, "127.0.0.1"))
            return await _ask(worker)

    assert asyncio.run(attack()).startswith(b"HTTP/1.1 200")


def test_a_stranger_behind_a_workers_address_does_not_keep_it_out() -> None:
    async def attack() -> bytes:
        async with (
            HttpListener(FEW, _explain).listening("127.0.0.1", 0, _answer, PlainStream) as port,
            contextlib.AsyncExitStack() as stack,
        ):
            await _flood(stack, port, ["127.0.0.1"])
            worker = await stack.enter_async_context(_connected(port, "127.0.0.1"))
            return await _ask(worker)

    assert asyncio.run(attack()).startswith(b"HTTP/1.1 200")


@pytest.mark.threat("B9")
def test_a_request_that_is_being_answered_does_not_give_way_to_a_flood() -> None:
    asked, flooded = asyncio.Event(), asyncio.Event()

    async def slowly(_: Request) -> Response:
        asked.set()
        await flooded.wait()
        return Response(200, b"{}")

    async def attack() -> bytes:
        async with (
            HttpListener(FEW, _explain).listening("127.0.0.1", 0, slowly, PlainStream) as port,
            contextlib.AsyncExitStack() as stack,
        ):
            worker = await stack.enter_async_context(_connected(port, "127.0.0.1"))
            answer = asyncio.create_task(_ask(worker))
            await asked.wait()
            for _ in range(3):
                await _flood(stack, port, ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
            flooded.set()
            return await answer

    assert asyncio.run(attack()).startswith(b"HTTP/1.1 200")


@pytest.mark.threat("B9")
def test_half_sent_requests_of_one_network_of_ipv6_end_their_own() -> None:
    """One host has a /64 of addresses, so a limit for each address would not limit it."""
    dropped: list[str] = []
    bodies = Bodies(limit=100)
    worker = bodies.open("2001:db8:1::1", lambda: dropped.append("worker"))
    worker.add(bytes(30))
    for number in range(1, 9):
        address = f"2001:db8:2::{number}"
        bodies.open(address, lambda address=address: dropped.append(address)).add(bytes(20))
    assert dropped
    assert "worker" not in dropped
