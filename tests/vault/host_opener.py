"""A GPU played by the CPU: OpenSSL opens the listed chunks, under keys by the standard's text.

A batch is opened when it is asked for and not before, so memory that is used again too early gives
other bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring import _native
from sealring.core.engine.cuda.chunks import NO_FAILURE
from sealring.vault.datasets.dataset import Stream
from sealring.vault.datasets.gpu_loader import GpuLoader
from sealring.vault.gpu_batches import Opened, Plan, SealedPart, SealedParts
from sealring.vault.vault import Vault

SALT_BYTES = 24
KeyOf = Callable[[int], tuple[_native.Secret, bytes]]
"""The input key of a file and its context."""


class HostSlot:
    def __init__(self, opener: HostOpener) -> None:
        self._opener = opener
        self._memory = bytearray()
        self._plan: Plan | None = None

    def room(self, size: int) -> memoryview:
        self._opener.require_working()
        assert self._plan is None, "the batch before was not taken"
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)

    def start(self, plan: Plan) -> None:
        self._opener.require_working()
        self._plan = plan
        self._opener.add_keys(plan)

    def finish(self) -> Opened:
        assert not self._opener.closed
        plan, self._plan = self._plan, None
        assert plan is not None
        plain, failed = bytearray(plan.plain_bytes), NO_FAILURE
        for place, chunk in enumerate(plan.chunks):
            start, to, number, size, file = (int(value) for value in chunk)
            assert start % 16 == to % 16 == 0
            try:
                opened = self._opener.open(file, number, self._memory[start : start + size + 16])
            except InvalidTag:
                failed = place
            else:
                plain[to : to + size] = opened
        self._opener.opened_bytes += plan.sealed_bytes
        rows = torch.from_numpy(plan.rows.view(np.int64).reshape(-1, 4).copy())
        return Opened(torch.from_numpy(np.frombuffer(plain, np.uint8).copy()), rows, failed)


class HostOpener:
    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._keys: dict[int, tuple[ChaCha20Poly1305, int]] = {}
        self._thread: int | None = None
        self.opened_bytes = 0
        self.closed = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        assert self._thread is None, "two threads work at the same time"
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def require_working(self) -> None:
        assert self._thread == threading.get_ident()
        assert not self.closed

    def slot(self) -> HostSlot:
        return HostSlot(self)

    def add_keys(self, plan: Plan) -> None:
        for file, part in plan.files.items():
            if file not in self._keys:
                self._keys[file] = chunk_key(part, *self._key_of(file))

    def open(self, file: int, number: int, sealed: bytearray) -> bytes:
        key, base = self._keys[file]
        return key.decrypt((base ^ number).to_bytes(12, "big"), bytes(sealed), None)

    def give(self, plain: torch.Tensor, rows: torch.Tensor) -> None:
        assert not self.closed

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        made = np.empty((len(rows), length * dtype.itemsize), np.uint8)
        for number, (start, size, item, pad) in enumerate(rows.tolist()):
            kind = np.dtype(f"<{'i' if item < 0 else 'u'}{abs(item)}")
            found = np.frombuffer(plain.numpy()[start : start + size].tobytes(), kind)
            row = np.full(length, pad, np.int64)
            row[: len(found)] = found.astype(np.int64)[:length]  # of uint64 the bits
            made[number] = row.view(np.uint8).reshape(length, 8)[:, : dtype.itemsize].reshape(-1)
        return torch.from_numpy(made.reshape(-1)).view(dtype).view(len(rows), length)

    def close(self) -> None:
        assert self._thread is None
        self.closed += 1
        self._keys.clear()


def chunk_key(
    part: SealedPart, secret: _native.Secret, context: bytes
) -> tuple[ChaCha20Poly1305, int]:
    """The key and the base nonce, by the standard's text."""
    salt = bytearray(SALT_BYTES)
    run = np.array([0, 0, SALT_BYTES, 0], np.uint64)
    _native.copy_sealed([part.reader], run.data, salt, 1)
    info = b"c2sp.org/chunked-encryption@v1+AEAD_CHACHA20_POLY1305\0" + bytes(salt) + context
    derived = HKDFExpand(SHA512(), 76, info).derive(bytes(memoryview(secret)))
    return ChaCha20Poly1305(derived[:32]), int.from_bytes(derived[32:44], "big")


class HostLoader(GpuLoader):
    """A GpuLoader on the device "cpu". Its opener takes the keys from the vault itself."""

    def __init__(self, stream: Stream, vault: Vault, *, ahead: int = 2) -> None:
        self._shards = [(one, shard.part) for one in stream.datasets for shard in one.shards]
        self._vault = vault
        super().__init__(stream, "cpu", ahead=ahead)

    def make_opener(self, device: torch.device, files: SealedParts) -> HostOpener:
        def key_of(number: int) -> tuple[_native.Secret, bytes]:
            dataset, part = self._shards[number]
            place = self._vault.find(dataset.name, dataset.version).copy.place
            return place.part_key(part), place.context(part)

        return HostOpener(key_of)

    @property
    def opener(self) -> HostOpener:
        assert isinstance(self._opener, HostOpener)
        return self._opener
