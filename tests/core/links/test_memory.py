"""Shared memory from a peer is used only if it has the right kind, size and seals."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring._native import LinkMemory
from sealring.core.links.descriptors import leave
from sealring.core.links.memory import MEMORY_BYTES, OwnMemory, create_memory, open_memory
from sealring.errors import Unsupported
from sealring.limits import RING_BYTES

SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
FUTURE_WRITE = 0x10
ALL = SHRINK | GROW | SEAL | FUTURE_WRITE


pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


@pytest.fixture
def own() -> Iterator[OwnMemory]:
    memory = create_memory()
    yield memory
    memory.close()


def memory(seals: int, size: int = MEMORY_BYTES) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_made_can_be_passed_on_and_mapped(own: OwnMemory) -> None:
    leave(own.inbox.address, [own.fd])
    assert isinstance(own.take_peers(), LinkMemory)
    assert not os.get_inheritable(own.fd)


def test_memory_that_was_not_left_is_missed(own: OwnMemory) -> None:
    with pytest.raises(Unsupported, match="did not come"):
        own.take_peers()


@pytest.mark.threat("R7", "R9")
def test_no_other_process_can_write_and_none_can_change_the_size(own: OwnMemory) -> None:
    """Even the descriptor gives no write access: the maker's mapping is the only writable one."""
    fd = own.fd
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


@pytest.mark.parametrize("missing", [SHRINK, GROW, SEAL, FUTURE_WRITE])
@pytest.mark.threat("R9")
def test_other_seals_are_refused(missing: int) -> None:
    fd = memory(ALL & ~missing)
    with pytest.raises(Unsupported, match="not sealed against other writers and sizes"):
        open_memory(fd)
    os.close(fd)


@pytest.mark.threat("R10")
def test_another_size_is_refused() -> None:
    fd = memory(ALL, MEMORY_BYTES - 4096)
    with pytest.raises(Unsupported, match=f"and not {MEMORY_BYTES}"):
        open_memory(fd)
    os.close(fd)


@pytest.mark.threat("R10")
def test_memory_with_holes_is_refused() -> None:
    fd = memory(ALL)
    with pytest.raises(Unsupported, match="not allocated"):
        open_memory(fd)
    os.close(fd)


@pytest.mark.threat("R10")
def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    read, write = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, MEMORY_BYTES)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (read, null, plain):
        with pytest.raises(Unsupported, match="cannot be checked"):
            open_memory(fd)
    for fd in (read, write, plain, null):
        os.close(fd)
