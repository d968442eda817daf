"""An inbox accepts descriptors only from senders that know the inbox's token."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from sealring.core.links import threads
from sealring.core.links.descriptors import Address, Inbox, close_received, leave
from sealring.core.links.memory import create_memory
from sealring.errors import Unsupported

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    one = Inbox(range(20))
    yield one
    one.close()


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def same_file(a: int, b: int) -> bool:
    return os.path.sameopenfile(a, b)


def test_each_sender_is_taken_once_and_its_first_descriptors_count(inbox: Inbox, file: int) -> None:
    other = os.memfd_create("other")
    leave(inbox.address, [file], 3)
    leave(inbox.address, [other, file], 17)
    leave(inbox.address, [other], 3)
    taken = inbox.take()
    assert taken.keys() == {3, 17}
    assert same_file(taken[3][0], file)
    assert same_file(taken[17][0], other)
    assert same_file(taken[17][1], file)
    assert not any(os.get_inheritable(fd) for fds in taken.values() for fd in fds)
    assert inbox.take() == {}
    close_received(fd for fds in taken.values() for fd in fds)
    os.close(other)


@pytest.mark.threat("R10", "C11")
def test_who_does_not_know_the_token_leaves_nothing(inbox: Inbox, file: int) -> None:
    for place in range(32):
        token = bytearray(inbox.address.token)
        token[place] ^= 1
        leave(replace(inbox.address, token=bytes(token)), [file])
    assert inbox.take() == {}


def test_a_number_that_is_not_expected_leaves_nothing(file: int) -> None:
    inbox = Inbox([0, 2])
    leave(inbox.address, [file], 1)
    assert inbox.take() == {}
    inbox.close()


def sent(message: bytes, descriptors: list[int], inbox: Inbox) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        stranger.sendmsg([message], ancillary, socket.MSG_DONTWAIT, inbox.address.path(0))


@pytest.mark.threat("R10")
def test_messages_of_another_form_are_refused_even_with_the_token(inbox: Inbox, file: int) -> None:
    good = inbox.address.token + struct.pack("<I", 0)
    sent(good, [], inbox)
    sent(good[:-1], [file], inbox)
    sent(good + b"x", [file], inbox)
    sent(b"", [file], inbox)
    assert inbox.take() == {}


@pytest.mark.threat("R11")
def test_strangers_do_not_fill_an_inbox(inbox: Inbox, file: int) -> None:
    for _ in range(300):
        sent(bytes(36), [file], inbox)
    leave(inbox.address, [file])
    taken = inbox.take()
    assert same_file(taken[0][0], file)
    close_received(taken[0])


def test_every_sender_of_a_large_inbox_has_room(file: int) -> None:
    inbox = Inbox(range(256))
    for sender in range(256):
        leave(inbox.address, [file], sender)
    taken = inbox.take()
    assert taken.keys() == set(range(256))
    close_received(fd for fds in taken.values() for fd in fds)
    inbox.close()


def test_a_full_inbox_is_an_error_of_the_sender(inbox: Inbox, file: int) -> None:
    def leave_without_end() -> None:
        for _ in range(100_000):
            leave(inbox.address, [file])

    with pytest.raises(Unsupported, match="cannot be passed to the peer"):
        leave_without_end()


def test_an_inbox_that_is_not_in_this_network_namespace(file: int) -> None:
    with pytest.raises(Unsupported, match="not in this worker's network namespace"):
        leave(Address(bytes(32), bytes(32)), [file])


def test_an_address_shows_no_token() -> None:
    address = Address(bytes(32), b"t" * 32)
    assert "t" * 32 not in repr(address)
    assert Address.unpacked(address.packed()) == address


# ---- descriptors that take long to close ---------------------------------------------------------


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """Yields a TCP socket whose last close() waits up to an hour for its peer to read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    try:
        yield near
    finally:
        far.close()  # this ends the wait of any close()
        near.close()
        while threads.at_work:
            time.sleep(0.01)


def ends_in_time(*calls: Callable[[], object]) -> None:
    """Runs the calls in a thread, so that a call that waits for an hour only fails this test."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for call in calls:
                call()
        except BaseException as problem:
            failures.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failures, failures


def left_and_forgotten(leaving: Callable[[int], None], one: socket.socket) -> None:
    """Sends the socket's descriptor and closes ours, so only the datagram refers to the socket."""
    with contextlib.suppress(Unsupported):
        leaving(one.fileno())
    held = threading.Thread(target=one.close)  # this close waits if the datagram was dropped
    held.start()
    held.join(0.2)


@pytest.mark.threat("R11")
def test_a_strangers_descriptor_that_lingers_delays_no_worker() -> None:
    with lingering() as one:
        inbox = Inbox()
        stranger = replace(inbox.address, token=bytes(32))
        left_and_forgotten(lambda fd: leave(stranger, [fd]), one)
        ends_in_time(inbox.take, inbox.close)


@pytest.mark.threat("R11")
def test_a_members_descriptor_that_lingers_delays_no_worker() -> None:
    with lingering() as one:
        memory = create_memory()
        left_and_forgotten(lambda fd: leave(memory.inbox.address, [fd]), one)

        def take() -> None:
            with pytest.raises(Unsupported, match="cannot be checked"):
                memory.take_peers()

        ends_in_time(take, memory.close)


@pytest.mark.threat("R11")
def test_a_descriptor_that_comes_when_nothing_is_taken_any_more_delays_no_worker() -> None:
    with lingering() as one:
        inbox = Inbox()
        left_and_forgotten(lambda fd: leave(inbox.address, [fd]), one)
        ends_in_time(inbox.close)
