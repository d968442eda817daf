"""A sealed file: both ways against other implementations, every byte flipped, every truncation."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from cryptography.cobblestone import Cobblestone256Decryptor, Cobblestone256Encryptor

from sealring import _native
from sealring.errors import ForkedProcess, TamperedChunk, TruncatedFile, WrongKey
from sealring.vault.digests import Hash, computed
from tests.vault import slow
from tests.vault.slow import CHUNK, HEADER, TAG

KEY = bytes(range(1, 33))
CONTEXT = b"what it is"
AES, CHACHA = "AEAD_AES_256_GCM", "AEAD_CHACHA20_POLY1305"
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 40 * CHUNK + 77]


def secret(key: bytes = KEY) -> _native.Secret:
    return _native.Secret(key)


def data(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def seal(path: Path, pieces: list[bytes], suite: str = AES, threads: int = 0) -> bytes:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        writer = _native.SealedFileWriter(file, secret(), suite, CONTEXT, "the file", threads)
        for piece in pieces:
            writer.write([piece])
        writer.finish()
        assert writer.length == sum(map(len, pieces))
    finally:
        os.close(file)
    sealed = path.read_bytes()
    assert sealed[24:HEADER] == writer.commitment
    assert len(sealed) == _native.sealed_length(sum(map(len, pieces)))
    return sealed


def reader_of(sealed: bytes, key: bytes = KEY, context: bytes = CONTEXT, suite: str = AES,
              threads: int = 0) -> _native.SealedFileReader:  # fmt: skip
    return _native.SealedFileReader(
        lambda offset, size: sealed[offset : offset + size],
        secret(key), suite, context, "the file", threads, len(sealed),
    )  # fmt: skip


def opened(sealed: bytes, **others: object) -> bytes:
    reader = reader_of(sealed, **others)  # type: ignore[arg-type]
    plain = bytearray(reader.length)
    reader.read_into(0, plain)
    return bytes(plain)


@pytest.mark.parametrize("suite", [AES, CHACHA])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.threat("V6")
def test_what_the_native_core_seals_opens_elsewhere(size: int, suite: str, tmp_path: Path) -> None:
    plain = data(size)
    sealed = seal(tmp_path / "f", [plain], suite)
    assert slow.seal(KEY, suite, sealed[:24], CONTEXT, plain) == sealed
    if suite == AES:
        other = Cobblestone256Decryptor(KEY, CONTEXT)
        assert other.update(sealed) + other.finalize() == plain


@pytest.mark.parametrize("suite", [AES, CHACHA])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.threat("V6")
def test_what_others_seal_opens_here(size: int, suite: str) -> None:
    plain = data(size)
    assert opened(slow.seal(KEY, suite, b"s" * 24, CONTEXT, plain), suite=suite) == plain
    if suite == AES:
        other = Cobblestone256Encryptor(KEY, CONTEXT)
        assert opened(other.update(plain) + other.finalize()) == plain


def test_the_same_plaintext_never_seals_to_the_same_bytes(tmp_path: Path) -> None:
    assert seal(tmp_path / "f", [b"x"])[:24] != seal(tmp_path / "g", [b"x"])[:24]


def test_pieces_of_any_size_make_one_stream(tmp_path: Path) -> None:
    chance = random.Random(1)
    plain = data(20 * CHUNK + 5)
    for _ in range(20):
        cuts = sorted(chance.sample(range(len(plain)), chance.randrange(30)))
        pieces = [plain[a:b] for a, b in zip([0, *cuts], [*cuts, len(plain)], strict=True)]
        assert opened(seal(tmp_path / "f", pieces, threads=3)) == plain
        file = os.open(tmp_path / "g", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        writer = _native.SealedFileWriter(file, secret(), AES, CONTEXT, "the file", 3)
        writer.write([b"", *pieces, b""])
        writer.finish()
        os.close(file)
        assert opened((tmp_path / "g").read_bytes()) == plain


def test_sealing_to_memory_gives_the_file_piece_by_piece() -> None:
    plain = data(5 * CHUNK + 100)
    writer = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file", 2)
    out = writer.take()
    for at in range(0, len(plain), 7000):
        writer.write([plain[at : at + 7000]])
        taken = writer.take()
        assert len(taken) % (CHUNK + TAG) == 0
        out += taken
    writer.finish()
    assert opened(out + writer.take()) == plain


def test_any_range_reads_only_its_chunks() -> None:
    plain = data(100 * CHUNK + 33)
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, plain)
    chance = random.Random(2)
    for _ in range(200):
        reader = reader_of(sealed, threads=2)
        before = reader.bytes_read
        start = chance.randrange(len(plain) + 1)
        size = min(chance.choice([0, 1, 100, CHUNK, 5 * CHUNK]), len(plain) - start)
        into = bytearray(size)
        reader.read_into(start, into)
        assert into == plain[start : start + size]
        assert reader.bytes_read - before <= (size // CHUNK + 2) * (CHUNK + TAG)


def test_boxes_of_an_array_are_read_in_order_and_each_chunk_once() -> None:
    shape, item = (40, 30, 20), 4
    plain = b"front" + data(40 * 30 * 20 * item)
    reader = reader_of(slow.seal(KEY, AES, b"s" * 24, CONTEXT, plain))
    chance = random.Random(3)
    wanted, expected = [], []
    for _ in range(50):
        offsets = [chance.randrange(n) for n in shape]
        lengths = [chance.randrange(n - o + 1) for n, o in zip(shape, offsets, strict=True)]
        if chance.random() < 0.5:
            offsets[1:], lengths[1:] = [0, 0], shape[1:]
        box = bytearray()
        for x in range(offsets[0], offsets[0] + lengths[0]):
            for y in range(offsets[1], offsets[1] + lengths[1]):
                at = 5 + ((x * 30 + y) * 20 + offsets[2]) * item
                box += plain[at : at + lengths[2] * item]
        wanted.append((bytearray(len(box)), 5, item, shape, offsets, lengths))
        expected.append(box)
    before = reader.bytes_read
    reader.read_boxes(wanted)
    assert [each[0] for each in wanted] == expected
    assert reader.bytes_read - before <= len(plain) + 10 * TAG
    scalar = bytearray(4)
    reader.read_boxes([(scalar, 5, 4, (), (), ())])
    assert scalar == plain[5:9]


@pytest.mark.parametrize(
    "box",
    [
        (bytearray(4), 0, 4, (10,), (10,), (1,)),
        (bytearray(8), 0, 4, (10,), (0,), (1,)),
        (bytearray(4), 0, 4, (10,), (0, 0), (1,)),
        (bytearray(4), 1 << 40, 4, (10,), (0,), (1,)),
    ],
)
def test_boxes_that_do_not_fit_are_refused(box: tuple[bytearray, int, int, object]) -> None:
    reader = reader_of(slow.seal(KEY, AES, b"s" * 24, CONTEXT, data(100)))
    with pytest.raises(ValueError, match=r"box|dimensions|asked for"):
        reader.read_boxes([box])  # type: ignore[list-item]
    assert bytes(box[0]) == bytes(len(box[0]))


@pytest.mark.parametrize("suite", [AES, CHACHA])
@pytest.mark.threat("V1")
def test_every_byte_flipped_is_refused(suite: str) -> None:
    sealed = slow.seal(KEY, suite, b"s" * 24, CONTEXT, data(300))
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1 << at % 8
        with pytest.raises(WrongKey if at < HEADER else TamperedChunk):
            opened(bytes(changed), suite=suite)


@pytest.mark.threat("V1")
def test_a_flip_in_any_chunk_is_refused_when_that_chunk_is_read() -> None:
    plain = data(4 * CHUNK + 10)
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, plain)
    for chunk in range(4):
        changed = bytearray(sealed)
        changed[HEADER + chunk * (CHUNK + TAG) + 5] ^= 4
        reader = reader_of(bytes(changed))
        into = bytearray(b"\xee" * len(plain))
        with pytest.raises(TamperedChunk, match=f"chunk {chunk} of 5 "):
            reader.read_into(0, into)
        # What was not found authentic was not given out: it was opened there, and overwritten.
        assert into[chunk * CHUNK : (chunk + 1) * CHUNK] == bytes(CHUNK)
        tensor = bytearray(b"\xee" * len(plain))
        with pytest.raises(TamperedChunk, match=f"chunk {chunk} of 5 "):
            reader.read_boxes([(tensor, 0, 1, [len(plain)], [0], [len(plain)])])
        # Memory that others may see never held it.
        assert tensor[chunk * CHUNK : (chunk + 1) * CHUNK] == b"\xee" * CHUNK
        with pytest.raises(TamperedChunk):
            reader.verify(0, reader.chunks)
        other = bytearray(10)
        reader.read_into(4 * CHUNK, other)
        assert other == plain[4 * CHUNK :]


@pytest.mark.threat("V2")
def test_every_truncation_is_refused() -> None:
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, data(300))
    for size in range(len(sealed)):
        with pytest.raises(TruncatedFile if size < HEADER + TAG else TamperedChunk):
            opened(sealed[:size])


@pytest.mark.threat("V2")
def test_truncation_and_extension_at_chunks_are_refused_before_anything_is_read() -> None:
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, data(2 * CHUNK + 8))
    for cut in (HEADER + CHUNK + TAG, HEADER + 2 * (CHUNK + TAG), HEADER):
        with pytest.raises(TruncatedFile):
            reader_of(sealed[:cut])
    for more in (b"\0", sealed[-24:], bytes(CHUNK), sealed[HEADER : HEADER + CHUNK + TAG]):
        with pytest.raises((TamperedChunk, TruncatedFile)):
            reader_of(sealed + more)


@pytest.mark.threat("V1")
def test_swapped_chunks_are_refused() -> None:
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, data(2 * CHUNK))
    first, second = HEADER + CHUNK + TAG, HEADER + 2 * (CHUNK + TAG)
    swapped = sealed[:HEADER] + sealed[first:second] + sealed[HEADER:first] + sealed[second:]
    with pytest.raises(TamperedChunk, match="chunk 0"):
        opened(swapped)


@pytest.mark.parametrize(
    "others",
    [{"key": KEY[::-1]}, {"context": CONTEXT + b"x"}, {"context": b""}, {"suite": CHACHA}],
    ids=["key", "context", "no context", "suite"],
)
@pytest.mark.threat("V1")
def test_another_key_context_or_suite_opens_nothing(others: dict[str, object]) -> None:
    with pytest.raises(WrongKey):
        opened(slow.seal(KEY, AES, b"s" * 24, CONTEXT, b"plain"), **others)


@pytest.mark.parametrize("key", [KEY[:16], KEY + b"x", b""])
def test_keys_of_another_length_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        reader_of(bytes(100), key)


@pytest.mark.threat("V2")
def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    seal(tmp_path / "f", [data(10 * CHUNK)])
    file = os.open(tmp_path / "f", os.O_RDWR)
    reader = _native.SealedFileReader(file, secret(), AES, CONTEXT, "the file")
    os.truncate(file, 3 * CHUNK)
    with pytest.raises(TruncatedFile, match="became shorter"):
        reader.read_into(0, bytearray(reader.length))
    os.close(file)


def test_a_full_disk_is_an_oserror_and_ends_the_writer() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="the file cannot be written") as raised:
        _native.SealedFileWriter(file, secret(), AES, CONTEXT, "the file")
    assert raised.value.errno == errno.ENOSPC
    os.close(file)


def test_a_writer_that_failed_or_finished_writes_no_more(tmp_path: Path) -> None:
    file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    writer = _native.SealedFileWriter(file, secret(), AES, CONTEXT, "the file", 2)
    os.close(file)
    with pytest.raises(OSError, match="cannot be written"):
        writer.write([data(64 * CHUNK)])
    for call in (lambda: writer.write([b"x"]), writer.finish):
        refuses(call, "failed before")
    done = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file")
    done.finish()
    for call in (lambda: done.write([b"x"]), done.finish):
        refuses(call, "is finished")


def refuses(call: Callable[[], None], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        call()


def test_an_error_of_the_source_reaches_the_caller_from_every_thread() -> None:
    sealed = slow.seal(KEY, AES, b"s" * 24, CONTEXT, data(64 * CHUNK))
    broken = False

    def read(offset: int, size: int) -> bytes:
        if broken and offset > HEADER:
            raise ConnectionError("the store is gone")
        return sealed[offset : offset + size]

    reader = _native.SealedFileReader(read, secret(), AES, CONTEXT, "the file", 3, len(sealed))
    broken = True
    with pytest.raises(ConnectionError, match="the store is gone"):
        reader.read_into(0, bytearray(reader.length))


@pytest.mark.threat("P21")
def test_a_forked_child_can_use_neither_end(tmp_path: Path) -> None:
    sealed = seal(tmp_path / "f", [data(CHUNK)])
    reader = reader_of(sealed)
    writer = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file")
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: reader.read_into(0, bytearray(9)), writer.finish):
            try:
                call()
            except ForkedProcess:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    writer.finish()
    assert opened(writer.take()) == b""


@pytest.mark.parametrize("name", ["sha256", "blake3"])
@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 40 * 16384, 40 * 16384 + 5])
def test_digests_of_chunks(size: int, name: Hash, tmp_path: Path) -> None:
    plain = os.urandom(size)
    starts = range(0, size // CHUNK * CHUNK + 1, CHUNK)
    one: Any = hashlib.sha256 if name == "sha256" else blake3
    wanted = b"".join(one(plain[at : at + CHUNK]).digest() for at in starts)
    assert _native.chunk_digests(plain, computed(name)) == wanted
    key = _native.Secret.random(32)
    with (tmp_path / "file").open("w+b") as file:
        writer = _native.SealedFileWriter(
            file.fileno(), key, "AEAD_AES_256_GCM", b"x", "it", hash=computed(name)
        )
        for at in range(0, size, 10000):
            writer.write([plain[at : at + 3000], plain[at + 3000 : at + 10000]])
        writer.finish()
        assert writer.digests == wanted
        reader = _native.SealedFileReader(file.fileno(), key, "AEAD_AES_256_GCM", b"x", "it")
        reader.expect(wanted, computed(name))
        assert reader.verify(0, reader.chunks) == reader.chunks
        for wrong in (wanted[:-1], wanted + bytes(32), b""):
            with pytest.raises(TamperedChunk, match="another number of chunks"):
                reader.expect(wrong, computed(name))
        for chunk in range(reader.chunks):
            other = bytearray(wanted)
            other[32 * chunk + 31] ^= 1
            reader.expect(bytes(other), computed(name))
            with pytest.raises(TamperedChunk, match=rf"chunk {chunk} of .* other bytes"):
                reader.verify(0, reader.chunks)


def test_a_hash_that_fails_ends_the_write() -> None:
    def broken(view: memoryview, step: int, count: int) -> bytes:
        raise ArithmeticError("no digest")

    writer = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file", 3, broken)
    with pytest.raises(ArithmeticError, match="no digest"):
        writer.write([data(40 * CHUNK)])
    with pytest.raises(RuntimeError, match="writing failed before"):
        writer.finish()


@pytest.mark.parametrize("given", [b"", bytes(31), bytes(33), bytes(64)])
def test_a_hash_that_gives_another_number_of_digests(given: bytes) -> None:
    with pytest.raises(ValueError, match="another number of digests"):
        _native.chunk_digests(b"x", lambda view, step, count: given)
    with pytest.raises(ValueError, match="sha256"):
        _native.chunk_digests(b"x", "md5")  # type: ignore[arg-type]


def test_a_hash_that_seals_another_file_meanwhile() -> None:
    """As a signal's handler may, in the thread of a write: neither takes the other's memory."""
    plain, inner = data(20 * CHUNK), data(9 * CHUNK + 5)
    found: list[bytes] = []

    def seals(view: memoryview, step: int, count: int) -> bytes:
        other = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the other", 1, "sha256")
        other.write([inner])
        other.finish()
        found.append(other.digests)
        return computed_by_hashlib(view, count)

    def computed_by_hashlib(view: memoryview, count: int) -> bytes:
        pieces = (view[CHUNK * at : CHUNK * (at + 1)] for at in range(count))
        return b"".join(hashlib.sha256(piece).digest() for piece in pieces)

    writer = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file", 1, seals)
    writer.write([plain])
    writer.finish()
    assert writer.digests == _native.chunk_digests(plain)
    assert set(found) == {_native.chunk_digests(inner)}


def test_what_a_writer_holds_can_be_asked_while_its_hash_runs() -> None:
    """The one who asks must not keep Python's lock from the hash."""
    asked = threading.Event()
    lengths: list[int] = []

    def waits(view: memoryview, step: int, count: int) -> bytes:
        asked.wait(10)
        return bytes(32 * count)

    writer = _native.SealedFileWriter(-1, secret(), AES, CONTEXT, "the file", 1, waits)
    write = threading.Thread(target=writer.write, args=([data(CHUNK)],))
    ask = threading.Thread(target=lambda: lengths.append(writer.length))
    write.start()
    ask.start()
    asked.set()
    for thread in (write, ask):
        thread.join(20)
        assert not thread.is_alive()
    assert lengths[0] in (0, CHUNK)
