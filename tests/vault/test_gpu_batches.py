"""What the GPU is told to open, done by OpenSSL in its place: tests/gpu has the GPU itself."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from sealring import _native
from sealring.core.engine.cuda.chunks import CHUNK_BYTES
from sealring.errors import (
    AlreadyClosed,
    ConfigurationError,
    ForkedProcess,
    TamperedChunk,
    TruncatedFile,
    Unsupported,
    VaultBusy,
)
from sealring.vault.gpu_batches import Batch, GpuBatches, Sample, SealedPart, plan_of
from tests.codes import coded
from tests.vault.host_opener import HostOpener
from tests.vault.sealed_parts import place, sealed_parts

SIZES = (1, 100, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1, 5 * CHUNK_BYTES + 777)


def batches_of(files: list[SealedPart], **options: int) -> GpuBatches:
    def key_of(number: int) -> tuple[_native.Secret, bytes]:
        part = f"shard {number}"
        return place().part_key(part), place().context(part)

    return GpuBatches(HostOpener(key_of), files, **options)


def contents_of(batch: Batch) -> list[bytes]:
    return [bytes(batch[index].numpy()) for index in range(len(batch))]


def test_the_planned_chunks_hold_the_samples(tmp_path: Path) -> None:
    contents = [random.Random(size).randbytes(size) for size in SIZES]
    draw = random.Random(1)
    with sealed_parts(tmp_path, contents) as files:
        samples = [Sample(file, 0, len(plain)) for file, plain in enumerate(contents)]
        for _ in range(50):
            file = draw.randrange(len(contents))
            offset = draw.randrange(len(contents[file]))
            samples.append(Sample(file, offset, draw.randint(1, len(contents[file]) - offset)))
        expected = [contents[s.file][s.offset : s.offset + s.bytes] for s in samples]
        (batch,) = batches_of(files).opened([samples])
        assert contents_of(batch) == expected


def test_each_chunk_is_listed_once_and_neighbours_are_read_together(tmp_path: Path) -> None:
    with sealed_parts(tmp_path, [bytes(10 * CHUNK_BYTES)] * 2) as files:
        samples = [Sample(1, 5 * CHUNK_BYTES - 1, 2), Sample(1, 3 * CHUNK_BYTES, 2 * CHUNK_BYTES)]
        plan = plan_of([*samples, *samples, Sample(1, 9 * CHUNK_BYTES, 1), Sample(0, 0, 1)], files)
        listed = [(int(chunk["file"]), int(chunk["number"])) for chunk in plan.chunks]
        assert listed == [(0, 0), (1, 3), (1, 4), (1, 5), (1, 9)]
        assert plan.reads[["file", "bytes"]].tolist() == [
            (0, 16400), (1, 3 * 16400), (1, 16400)
        ]  # fmt: skip


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_come_in_their_order_whatever_is_ahead(tmp_path: Path, ahead: int) -> None:
    contents = [random.Random(size).randbytes(size) for size in SIZES]
    with sealed_parts(tmp_path, contents) as files:
        order = [[Sample(number % len(SIZES), 0, 1), Sample(5, number, 40)] for number in range(9)]
        found = batches_of(files, ahead=ahead).opened([*order, [], [Sample(0, 1, 0)]])
        for samples, batch in zip([*order, [], [Sample(0, 1, 0)]], found, strict=True):
            assert contents_of(batch) == [
                contents[one.file][one.offset : one.offset + one.bytes] for one in samples
            ]


def test_batches_before_one_that_cannot_be_read_are_given_out(tmp_path: Path) -> None:
    def wanted() -> Iterator[list[Sample]]:
        yield [Sample(0, 0, 1)]
        yield [Sample(0, 1, 1)]
        raise VaultBusy("the dataset was sealed anew", code="vault.keys_changed")

    with sealed_parts(tmp_path, [b"ab"]) as files:
        found = batches_of(files).opened(wanted())
        assert [contents_of(next(found)) for _ in range(2)] == [[b"a"], [b"b"]]
        with pytest.raises(VaultBusy, check=coded("vault.keys_changed")):
            next(found)


@pytest.mark.threat("V3")
def test_batches_behind_a_changed_one_are_not_given_out(tmp_path: Path) -> None:
    with sealed_parts(tmp_path, [bytes(3 * CHUNK_BYTES)]) as files:
        with (tmp_path / "0.sealed").open("r+b") as file:
            file.seek(56 + 16400)
            file.write(b"changed")
        order = [[Sample(0, number * CHUNK_BYTES, 1)] for number in (0, 1, 2)]
        found = batches_of(files).opened(order)
        assert contents_of(next(found)) == [b"\0"]
        with pytest.raises(TamperedChunk, match=r"chunk 1 of 0\.sealed"):
            next(found)
        with pytest.raises(StopIteration):
            next(found)


@pytest.mark.parametrize(
    ("change", "error", "about"),
    [
        (lambda path: os.truncate(path, 56 + 16400 + 9), TruncatedFile, "became shorter"),
        (
            lambda path: path.write_bytes((path.parent / "1.sealed").read_bytes()),
            TamperedChunk,
            r"chunk 1 of 0\.sealed",
        ),
    ],
)
def test_a_file_that_is_cut_or_exchanged_while_it_is_read(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], about: str
) -> None:
    def wanted() -> Iterator[list[Sample]]:
        yield [Sample(0, 0, 1)]
        change(tmp_path / "0.sealed")
        yield [Sample(0, CHUNK_BYTES, 1)]

    before = threading.active_count()
    with sealed_parts(tmp_path, [bytes(2 * CHUNK_BYTES)] * 2) as files:
        found = batches_of(files).opened(wanted())
        assert contents_of(next(found)) == [b"\0"]
        with pytest.raises(error, match=about):
            next(found)
        assert threading.active_count() == before


def test_a_later_iteration_ends_the_one_before_and_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    with sealed_parts(tmp_path, [b"a"]) as files:
        batches = batches_of(files)
        first = batches.opened([[Sample(0, 0, 1)]] * 100)
        next(first)
        second = batches.opened([[Sample(0, 0, 1)]] * 100)
        next(second)
        with pytest.raises(AlreadyClosed, match="later one"):
            next(first)
        next(second)
        batches.close()
        batches.close()
        with pytest.raises(AlreadyClosed, match="was closed"):
            next(second)
        with pytest.raises(AlreadyClosed, match="was closed"):
            next(batches.opened([]))
    assert threading.active_count() == before


def test_close_wakes_a_thread_that_waits_for_a_batch(tmp_path: Path) -> None:
    reading, closing = threading.Event(), threading.Event()

    def wanted() -> Iterator[list[Sample]]:
        reading.set()
        assert closing.wait(60)
        yield [Sample(0, 0, 1)]

    with sealed_parts(tmp_path, [b"a"]) as files, ThreadPoolExecutor(2) as threads:
        batches = batches_of(files)
        taken = threads.submit(lambda: next(batches.opened(wanted())))
        assert reading.wait(60)
        closed = threads.submit(batches.close)
        closing.set()
        closed.result(60)
        with pytest.raises(AlreadyClosed, match="was closed"):
            taken.result(60)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(0, 90, 11),
        Sample(0, -1, 5),
        Sample(0, 3, -1),
        Sample(0, 2**63 - 1, 1),
        Sample(0, 1, 2**63 - 1),
    ],
)
def test_a_sample_that_is_not_there(tmp_path: Path, sample: Sample) -> None:
    with (
        sealed_parts(tmp_path, [bytes(100)]) as files,
        pytest.raises(ConfigurationError, match=r"0\.sealed holds 100 bytes"),
    ):
        plan_of([sample], files)


@pytest.mark.parametrize("item", [0, 9, -9, 3, -(2**63)])
def test_numbers_that_no_gpu_makes(tmp_path: Path, item: int) -> None:
    with (
        sealed_parts(tmp_path, [bytes(100)]) as files,
        pytest.raises(ConfigurationError, match=rf"not whole numbers of item={item}: "),
    ):
        plan_of([Sample(0, 0, 2), Sample(0, 0, 8, item)], files)


def test_rows_are_of_bytes_and_numbers_are_taken(tmp_path: Path) -> None:
    with sealed_parts(tmp_path, [b"abcdefgh"]) as files:
        wide = [Sample(0, 0, 4, -2), Sample(0, 4, 4, -2)]
        batches = batches_of(files)
        for batch in batches.opened([wide]):
            with pytest.raises(ConfigurationError, match=r"do not form rows of bytes: take\(\)"):
                batch.rows(torch.int16)
            with pytest.raises(Unsupported, match="1, 2, 4 or 8 bytes, and not"):
                batch.take(2, torch.complex128)
            taken = batch.take(2, torch.int16)
            assert taken.numpy().tobytes() == b"abcdefgh"
            assert batch.take(1, torch.int64).tolist() == [[0x6261], [0x6665]]
        batches.close()


def test_an_iteration_that_its_own_thread_ends(tmp_path: Path) -> None:
    """As a garbage collection there does, of an iterator that no other thread holds."""

    def wanted() -> Iterator[list[Sample]]:
        yield [Sample(0, 0, 1)]
        batches.stop()
        ended.set()
        yield [Sample(0, 0, 1)]

    ended = threading.Event()
    before = threading.active_count()
    with sealed_parts(tmp_path, [b"a"]) as files:
        batches = batches_of(files)
        with pytest.raises(AlreadyClosed, match="later one"):
            list(batches.opened(wanted()))
        batches.close()
    assert ended.is_set(), "the thread waited for itself"
    assert threading.active_count() == before


def test_a_forked_child_takes_no_batches(tmp_path: Path) -> None:
    """It has no thread that reads them: it would wait for ever."""
    with sealed_parts(tmp_path, [b"a"]) as files:
        batches = batches_of(files)
        found = batches.opened([[Sample(0, 0, 1)]] * 3)
        next(found)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                next(found)
            except ForkedProcess:
                os._exit(17)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert len(list(found)) == 2
        batches.close()


def test_ciphertext_of_no_file(tmp_path: Path) -> None:
    run = np.array([0, 0, 1, 0], np.uint64)
    with pytest.raises(ValueError, match="names no file"):
        _native.copy_sealed([None], run.data, bytearray(1), 1)  # type: ignore[list-item]


def test_ciphertext_is_copied_as_it_is_by_any_number_of_threads(tmp_path: Path) -> None:
    contents = [random.Random(size).randbytes(size) for size in (5 << 20, 100)]
    with sealed_parts(tmp_path, contents) as files:
        readers = [part.reader for part in files]
        sealed = [(tmp_path / part.name).read_bytes() for part in files]
        runs = np.array([[0, 3, 3 << 20, 10], [1, 8, 5, 0], [0, 7, 1, 5]], np.uint64)
        for threads in (1, 3):
            room = bytearray(10 + (3 << 20))
            _native.copy_sealed(readers, runs.data, room, threads)
            assert room[10:] == sealed[0][3 : 3 + (3 << 20)]
            assert room[:6] == sealed[1][8:13] + sealed[0][7:8]


@pytest.mark.parametrize(
    ("run", "about"),
    [
        ([1, 0, 1, 0], "names no file"),
        ([0, 0, 11, 0], "reaches out of the buffer"),
        ([0, 0, 1, 11], "reaches out of the buffer"),
        ([0, 0, 2, 2**64 - 1], "reaches out of the buffer"),
        ([0, 170, 3, 0], r"0\.sealed has 172 bytes, and 3 from 170 on"),
        ([0, 2**64 - 1, 2, 0], r"0\.sealed has 172 bytes"),
        ([0, 0, 1], "four numbers"),
    ],
)
def test_ciphertext_that_is_not_there(tmp_path: Path, run: list[int], about: str) -> None:
    with sealed_parts(tmp_path, [bytes(100)]) as files, pytest.raises(ValueError, match=about):
        _native.copy_sealed([files[0].reader], np.array(run, np.uint64).data, bytearray(10), 1)


def test_ciphertext_of_a_file_that_was_cut_or_closed(tmp_path: Path) -> None:
    run = np.array([0, 0, 172, 0], np.uint64).data
    with sealed_parts(tmp_path, [bytes(100)]) as files:
        with (tmp_path / "0.sealed").open("r+b") as file:
            file.truncate(100)
        with pytest.raises(TruncatedFile, match="became shorter"):
            _native.copy_sealed([files[0].reader], run, bytearray(172), 1)
        files[0].reader.close()
        with pytest.raises(AlreadyClosed, match=r"0\.sealed was closed"):
            _native.copy_sealed([files[0].reader], run, bytearray(172), 1)
