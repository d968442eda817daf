"""A descriptor is taken out of an inbox only if its sender knew the inbox's token."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sealring.errors import Unsupported
from sealring.links.descriptors import Address, Inbox, leave

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    one = Inbox()
    yield one
    one.close()


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def same_file(a: int, b: int) -> bool:
    return os.path.sameopenfile(a, b)


def connected(inbox: Inbox) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(inbox.address.path)
    return stranger


def test_each_sender_is_taken_once_and_its_first_descriptor_counts(inbox: Inbox, file: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    leave(inbox.address, file, 3)
    leave(inbox.address, null, 7)
    leave(inbox.address, null, 3)
    taken = inbox.take()
    assert taken.keys() == {3, 7}
    assert same_file(taken[3], file)
    assert same_file(taken[7], null)
    assert not any(os.get_inheritable(fd) for fd in taken.values())
    assert inbox.take() == {}
    for fd in (*taken.values(), null):
        os.close(fd)


def test_who_does_not_know_the_token_leaves_nothing(inbox: Inbox, file: int) -> None:
    leave(replace(inbox.address, token=bytes(32)), file)
    assert inbox.take() == {}


def sent(message: bytes, descriptors: list[int], inbox: Inbox) -> None:
    with connected(inbox) as stranger:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        stranger.sendmsg([message], ancillary)


def test_messages_of_another_form_are_refused_even_with_the_token(inbox: Inbox, file: int) -> None:
    good = inbox.address.token + struct.pack("<I", 0)
    sent(good, [], inbox)
    sent(good, [file, file], inbox)
    sent(good[:-1], [file], inbox)
    sent(good + b"x", [file], inbox)
    assert inbox.take() == {}


def test_strangers_who_are_silent_or_gone_are_not_waited_for(inbox: Inbox, file: int) -> None:
    silent = [connected(inbox) for _ in range(300)]
    connected(inbox).close()
    leave(inbox.address, file)
    taken = inbox.take()
    assert same_file(taken[0], file)
    os.close(taken[0])
    for each in silent:
        each.close()


def test_a_full_inbox_is_an_error_of_the_sender(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    monkeypatch.setattr("sealring.links.descriptors._WAITING", 2)
    inbox = Inbox()
    strangers = [connected(inbox) for _ in range(3)]
    with pytest.raises(Unsupported, match="cannot be passed to the peer"):
        leave(inbox.address, file)
    for each in strangers:
        each.close()
    inbox.close()


def test_an_inbox_that_is_not_in_this_network_namespace(file: int) -> None:
    with pytest.raises(Unsupported, match="not in this worker's network namespace"):
        leave(Address(bytes(32), bytes(32)), file)


def test_an_address_shows_no_token() -> None:
    address = Address(bytes(32), b"t" * 32)
    assert "t" * 32 not in repr(address)
    assert Address.unpacked(address.packed()) == address
