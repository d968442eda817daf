"""Shared memory is taken only if it is what it must be."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.errors import Unsupported
from sealring.limits import RING_NONCE_OFFSET
from sealring.links.memory import MEMORY_BYTES, Offer, create_memory, open_memory

SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL


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


def test_what_is_made_can_be_opened() -> None:
    fd, offer = create_memory()
    other = open_memory(offer)
    os.pwrite(fd, b"x", 5000)
    assert os.pread(other, 1, 5000) == b"x"
    assert os.pread(fd, 32, RING_NONCE_OFFSET).hex() == offer.nonce
    assert not os.get_inheritable(other)
    os.close(fd)
    os.close(other)


@pytest.mark.parametrize(
    ("seals", "reason"),
    [
        (0, "not sealed"),
        (GROW | SEAL, "not sealed"),
        (SHRINK | SEAL, "not sealed"),
        (SHRINK | GROW, "not sealed"),
        (SHRINK | GROW | SEAL | fcntl.F_SEAL_WRITE, "sealed against writing"),
    ],
)
def test_other_seals_are_refused(seals: int, reason: str) -> None:
    fd = memory(seals)
    with pytest.raises(Unsupported, match=reason):
        open_memory(offered(fd))
    os.close(fd)


def test_another_size_is_refused() -> None:
    fd = memory(SHRINK | GROW | SEAL, MEMORY_BYTES - 4096)
    with pytest.raises(Unsupported, match=f"and not {MEMORY_BYTES}"):
        open_memory(offered(fd))
    os.close(fd)
    with pytest.raises(Unsupported, match="has 4096 bytes"):
        open_memory(Offer(1, 1, "00" * 32, 4096))


def test_another_nonce_is_refused() -> None:
    """Whoever guesses a descriptor finds memory, but not the nonce that came over TLS."""
    fd, offer = create_memory()
    with pytest.raises(Unsupported, match="does not hold its nonce"):
        open_memory(dataclasses.replace(offer, nonce="11" * 32))
    os.close(fd)


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
