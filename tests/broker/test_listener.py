"""A port that is closed while clients come."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import pytest

from sealring.broker.http import Limits, PlainStream, Request, Response
from sealring.broker.listener import Listener
from sealring.errors import SealringError


async def _answer(_: Request) -> Response:
    return Response(200, b"{}")


def _explain(_: SealringError, __: str, ___: str) -> Response:
    return Response(500, b"{}")


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_comes_with_the_end_is_not_left_open(turns: int) -> None:
    async def serve() -> socket.socket:
        async with Listener(Limits(), _explain).listening(
            "127.0.0.1", 0, _answer, PlainStream
        ) as port:
            client = socket.create_connection(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
            return client

    gc.disable()  # it would close what was left open
    try:
        with asyncio.run(serve()) as client:
            client.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    finally:
        gc.enable()
