"""Shared memory is taken only if it is what it must be."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring._native import LinkMemory
from sealring.errors import Unsupported
from sealring.limits import RING_BYTES, RING_NONCE_OFFSET
from sealring.links.memory import MEMORY_BYTES, Offer, create_memory, open_memory

SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
FUTURE_WRITE = 0x10
ALL = SHRINK | GROW | SEAL | FUTURE_WRITE


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def offered(fd: int) -> Offer:
    return Offer(os.getpid(), fd, bytes(32).hex(), MEMORY_BYTES)


def memory(seals: int, size: int = MEMORY_BYTES) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_made_can_be_opened_and_only_read() -> None:
    own = create_memory()
    open_memory(own.offer)
    assert os.pread(own.offer.fd, 32, RING_NONCE_OFFSET).hex() == own.offer.nonce
    assert not os.get_inheritable(own.offer.fd)
    own.close()


def test_nobody_else_gets_to_write_and_nobody_changes_the_size() -> None:
    """Not even with the descriptor itself: the maker's one mapping is all there is."""
    own = create_memory()
    fd = own.offer.fd
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, MEMORY_BYTES)
    with pytest.raises(RuntimeError, match="cannot map a link's shared memory"):
        LinkMemory(fd, RING_BYTES, writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    own.close()


@pytest.mark.parametrize("missing", [SHRINK, GROW, SEAL, FUTURE_WRITE])
def test_other_seals_are_refused(missing: int) -> None:
    fd = memory(ALL & ~missing)
    with pytest.raises(Unsupported, match="not sealed against other writers and sizes"):
        open_memory(offered(fd))
    os.close(fd)


def test_another_size_is_refused() -> None:
    fd = memory(ALL, MEMORY_BYTES - 4096)
    with pytest.raises(Unsupported, match=f"and not {MEMORY_BYTES}"):
        open_memory(offered(fd))
    os.close(fd)
    with pytest.raises(Unsupported, match="has 4096 bytes"):
        open_memory(Offer(1, 1, "00" * 32, 4096))


def test_another_nonce_is_refused() -> None:
    """Whoever guesses a descriptor finds memory, but not the nonce that came over TLS."""
    own = create_memory()
    with pytest.raises(Unsupported, match="does not hold its nonce"):
        open_memory(dataclasses.replace(own.offer, nonce="11" * 32))
    own.close()


def test_what_is_no_memory_is_not_opened(tmp_path: Path) -> None:
    read, write = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, MEMORY_BYTES)
    null = os.open("/dev/null", os.O_RDWR)
    for fd, reason in (
        (read, "no file"),
        (null, "no file"),
        (plain, "cannot be checked"),
    ):
        with pytest.raises(Unsupported, match=reason):
            open_memory(offered(fd))
    for fd in (read, write, plain, null):
        os.close(fd)
    with pytest.raises(Unsupported, match="not on this machine"):
        open_memory(Offer(os.getpid(), 99_999, "00" * 32, MEMORY_BYTES))
