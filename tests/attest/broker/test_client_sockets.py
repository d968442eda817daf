"""A worker that gives up on a broker leaves no connection to it open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from sealring.attest.broker.client import BrokerClient
from sealring.attest.broker.keys import issue_to_self, open_broker_keys
from sealring.attest.broker.tls import Client, answer, server_context
from sealring.core.identity.authority import create_authority
from sealring.errors import BrokerUnavailable
from tests.codes import coded


def descriptors() -> set[str]:
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{each} {os.readlink(f'/proc/self/fd/{each}')}")
    return {each for each in found if "socket:" in each}


async def upload(client: Client, where: str) -> None:
    """Sends more than a connection can hold while the broker does not read."""
    await client.ask("POST", "/", bytes(64 << 20))


def test_a_broker_that_stops_reading_holds_no_socket_of_a_worker(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "test")
    keys = open_broker_keys(tmp_path / "ca")
    context = server_context(*issue_to_self(keys, ["127.0.0.1"]))
    accepted: list[asyncio.StreamWriter] = []

    async def shake_hands_alone(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:  # fmt: skip
        accepted.append(writer)
        await answer(reader, writer, context).handshake()

    async def give_up() -> tuple[set[str], set[str]]:
        server = await asyncio.start_server(shake_hands_alone, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        before = descriptors()
        with pytest.raises(
            BrokerUnavailable, match="did not answer in time", check=coded("broker.unreachable")
        ):
            await BrokerClient([("127.0.0.1", port)], [keys.authority]).ask(upload, 5.0)
        await asyncio.sleep(0.1)  # lets the sockets close
        left = descriptors() - before
        own = {each.get_extra_info("socket").fileno() for each in accepted}
        for writer in accepted:
            writer.transport.abort()
        server.close()
        return {each for each in left if int(each.split()[0]) not in own}, left

    left, all_of_them = asyncio.run(give_up())
    assert all_of_them, "the broker's end is still open"
    assert left == set()


def test_a_name_that_cannot_be_asked_for_leaves_no_socket(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "test")
    keys = open_broker_keys(tmp_path / "ca")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def ask() -> set[str]:
            before = descriptors()
            client = BrokerClient([("x" * 64, port)], [keys.authority])
            with pytest.raises(UnicodeError) as caught:
                await client.keys_out("job", 30.0, address="127.0.0.1")
            await asyncio.sleep(0)
            found = descriptors() - before
            del caught
            return found

        assert asyncio.run(ask()) == set()
