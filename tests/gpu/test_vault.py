"""Sealed files opened in a GPU's memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sealring.core.engine.cuda.chunks import CHUNK_BYTES
from sealring.errors import ConfigurationError, TamperedChunk, TruncatedFile
from sealring.vault.gpu_batches import CudaOpener, GpuBatches, Sample, SealedPart
from tests.vault.sealed_parts import sealed_parts

SIZES = (100, CHUNK_BYTES, 3 * CHUNK_BYTES - 1, 40 * CHUNK_BYTES + 777)


def contents() -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in SIZES]


def drawn(count: int, plain: list[bytes], seed: int = 1) -> list[Sample]:
    draw, samples = random.Random(seed), []
    for _ in range(count):
        file = draw.randrange(len(plain))
        offset = draw.randrange(len(plain[file]))
        samples.append(Sample(file, offset, draw.randint(1, len(plain[file]) - offset)))
    return samples


def batches_of(files: list[SealedPart], ahead: int = 2) -> GpuBatches:
    return GpuBatches(CudaOpener("cuda", files), files, ahead=ahead)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_every_batch_is_what_was_sealed(tmp_path: Path, ahead: int) -> None:
    plain = contents()
    batches = [drawn(size, plain, size) for size in (1, 7, 64, 3, 3, 2, 20)]
    with sealed_parts(tmp_path, plain) as files:
        loader = batches_of(files, ahead)
        for samples, batch in zip(batches, loader.opened(batches), strict=True):
            for index, sample in enumerate(samples):
                found = bytes(batch[index].cpu().numpy())
                assert found == plain[sample.file][sample.offset : sample.offset + sample.bytes]
        loader.close()


def test_rows(tmp_path: Path) -> None:
    tokens = torch.arange(60000, dtype=torch.int32)
    with sealed_parts(tmp_path, [tokens.numpy().tobytes()]) as files:
        samples = [Sample(0, start * 4, 1024 * 4) for start in (5, 4096, 58000)]
        (batch,) = batches_of(files).opened([samples])
        expected = torch.stack([tokens[start : start + 1024] for start in (5, 4096, 58000)])
        assert torch.equal(batch.rows(torch.int32).cpu(), expected)


def test_rows_of_different_lengths(tmp_path: Path) -> None:
    with sealed_parts(tmp_path, [bytes(100)]) as files:
        (batch,) = batches_of(files).opened([[Sample(0, 0, 4), Sample(0, 4, 8)]])
        with pytest.raises(ConfigurationError, match="different lengths"):
            batch.rows(torch.int32)


@pytest.mark.parametrize("at", [56, 56 + 16384, 56 + 16400 + 5])
@pytest.mark.threat("V3")
def test_a_changed_chunk_is_named_and_nothing_of_its_batch_is_given_out(
    tmp_path: Path, at: int
) -> None:
    plain = [random.Random(1).randbytes(3 * CHUNK_BYTES)]
    with sealed_parts(tmp_path, plain) as files:
        with (tmp_path / "0.sealed").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        good = Sample(0, 2 * CHUNK_BYTES, 10)
        batches = batches_of(files).opened([[good], [good, Sample(0, 0, 20000)], [good]])
        assert bytes(next(batches)[0].cpu().numpy()) == plain[0][2 * CHUNK_BYTES :][:10]
        with pytest.raises(TamperedChunk, match=rf"chunk {(at - 56) // 16400} of 0\.sealed"):
            next(batches)


def test_a_file_that_was_cut_while_it_is_read(tmp_path: Path) -> None:
    with sealed_parts(tmp_path, [bytes(3 * CHUNK_BYTES)]) as files:
        with (tmp_path / "0.sealed").open("r+b") as file:
            file.truncate(20000)
        with pytest.raises(TruncatedFile, match="became shorter"):
            list(batches_of(files).opened([[Sample(0, 2 * CHUNK_BYTES, 10)]]))


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    before = threading.active_count()
    with sealed_parts(tmp_path, [bytes(100)]) as files:
        batches = batches_of(files).opened([[Sample(0, 0, 4)]] * 100)
        next(batches)
        batches.close()
    assert threading.active_count() == before
