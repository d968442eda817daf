"""The kernels on a GPU, compared with OpenSSL and the engine's arithmetic, and under forgery."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sealring.core.engine.collective import COMPLEXES, FLOATS, DType, ReduceKind, supported_kinds
from sealring.core.engine.cuda import compiler
from sealring.core.engine.cuda.kernels import (
    DeviceKey,
    Header,
    RecordKernels,
    definitions,
    record_count,
    wire_bytes,
)
from sealring.core.group.arguments import DTYPES
from sealring.errors import TamperedRecord
from tests.core.reference import reduce_into

KEY, OTHER_KEY, CONTEXT = bytes(range(32)), bytes(range(100, 132)), bytes(range(64, 96))
SHARES = [(64, 1), (4096, 1), (65536, 1), (65536, 4), (131072, 8), (1 << 20, 1), (1 << 20, 8)]
FLOAT_SUM = (DType.FLOAT32, ReduceKind.SUM)


def device() -> torch.device:
    return torch.device("cuda", 0)


def header(count: int = 5) -> Header:
    return Header(1, 1, 2, 7, 1, 3, 1, 1, 4, 0, 999, count=count, root=3)


def on_gpu(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(device())


def wire_for(size: int, record_bytes: int) -> torch.Tensor:
    return torch.zeros(wire_bytes(size, record_bytes) + 16, dtype=torch.uint8, device=device())


def sealed_by_openssl(plain: bytes, record_bytes: int, key: bytes, first: Header) -> bytes:
    aead, out = ChaCha20Poly1305(key), b""
    for number in range(record_count(len(plain), record_bytes)):
        part = plain[number * record_bytes : (number + 1) * record_bytes]
        words = first.record(number).packed(len(part))
        associated, count = words + CONTEXT, first.count + number
        out += words + aead.encrypt(struct.pack("<IQ", 1 << 31, count), b"", associated)
        out += aead.encrypt(struct.pack("<IQ", 0, count), part, associated)
    return out


def sizes(record_bytes: int) -> list[int]:
    edges = {0, 1, 15, 16, 17, 63, 64, 65, 100, 4096, 4097, 65535, 65600, 131071}
    edges |= {record_bytes - 1, record_bytes, record_bytes + 1, 3 * record_bytes + 77}
    return sorted(size for size in edges if size // record_bytes < 300)


@pytest.mark.parametrize(("record_bytes", "parts"), [(65536, 1), (131072, 8), (1 << 20, 1)])
@pytest.mark.threat("C12")
def test_tags_do_not_depend_on_what_others_write_into_the_output(
    record_bytes: int, parts: int
) -> None:
    """Other processes may write to the output's memory, so sealing must not read it back.

    This test keeps changing all payloads while they are being sealed.
    """
    kernels = RecordKernels(device(), CONTEXT, record_bytes, parts=parts)
    key = DeviceKey(device(), KEY)
    plain = os.urandom(32 * record_bytes)
    right = sealed_by_openssl(plain, record_bytes, KEY, header())
    stride = len(right) // 32
    tensor, wire = on_gpu(plain), torch.zeros(len(right), dtype=torch.uint8, device=device())
    payloads = wire.view(32, stride)[:, 80 : 80 + record_bytes]
    # Compiles now, so that the next call meets the writer.
    kernels.seal(tensor, key, header(), wire)
    torch.cuda.synchronize()
    changed = 0
    writer = torch.cuda.Stream()
    for _ in range(20):
        # Both streams wait until everything is queued, and then run at the same time.
        torch.cuda._sleep(40_000_000)
        writer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(writer):
            for number in range(200):
                payloads.bitwise_xor_(number)
        for _ in range(20):
            kernels.seal(tensor, key, header(), wire)
        torch.cuda.synchronize()
        sealed = bytes(wire.cpu().numpy())
        for at in range(0, len(right), stride):
            end = at + stride
            assert sealed[end - 16 : end] == right[end - 16 : end], "a tag follows the output"
            changed += sealed[at + 80 : end - 16] != right[at + 80 : end - 16]
    assert changed > 0


@pytest.mark.parametrize(("record_bytes", "parts"), SHARES)
def test_seals_as_openssl_does_and_opens_what_it_sealed(record_bytes: int, parts: int) -> None:
    kernels = RecordKernels(device(), CONTEXT, record_bytes, parts=parts)
    key = DeviceKey(device(), KEY)
    for size in sizes(record_bytes):
        plain = os.urandom(size)
        wire = wire_for(size, record_bytes)
        kernels.seal(on_gpu(plain), key, header(), wire)
        sealed = bytes(wire.cpu().numpy())[: wire_bytes(size, record_bytes)]
        assert sealed == sealed_by_openssl(plain, record_bytes, KEY, header()), size
        result = torch.full((size,), 0xAA, dtype=torch.uint8, device=device())
        kernels.open(wire, key, header(), result)
        kernels.check()
        assert bytes(result.cpu().numpy()) == plain, size


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_tensors_at_any_address(offset: int) -> None:
    kernels = RecordKernels(device(), CONTEXT, 4096)
    key, plain = DeviceKey(device(), KEY), os.urandom(10_000)
    memory = on_gpu(bytes(offset) + plain)
    wire = wire_for(len(plain), 4096)
    kernels.seal(memory[offset:], key, header(), wire)
    result = torch.zeros(len(plain) + offset, dtype=torch.uint8, device=device())
    kernels.open(wire, key, header(), result[offset:])
    kernels.check()
    assert bytes(result[offset:].cpu().numpy()) == plain


@pytest.mark.parametrize(("record_bytes", "parts"), SHARES[1:])
def test_hop_and_open_reduce(record_bytes: int, parts: int) -> None:
    kernels = RecordKernels(device(), CONTEXT, record_bytes, parts=parts)
    key, other = DeviceKey(device(), KEY), DeviceKey(device(), OTHER_KEY)
    for size in (4, 64, 4100, record_bytes, 2 * record_bytes + 68):
        theirs, ours, last = (torch.randn(size // 4, device=device()) for _ in range(3))
        first, second = wire_for(size, record_bytes), wire_for(size, record_bytes)
        kernels.seal(theirs, key, header(9), first)
        kept = ours.clone()
        kernels.hop((first, key, header(9)), ours, (second, other, header(3)), FLOAT_SUM)
        result = last.clone()
        kernels.open_reduce(second, other, header(3), result, FLOAT_SUM)
        kernels.check()
        assert torch.equal(ours, kept)
        assert torch.equal(result, last + (ours + theirs)), size


@pytest.fixture(scope="module")
def _compiled() -> None:
    """Compiles all kernels, as many at once as there are cores, because each takes seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: compiler.code_for(0, definitions(case)), CASES))


CASES = [(dtype, kind) for dtype in DType for kind in sorted(supported_kinds(dtype))]


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(("dtype", "kind"), CASES, ids=[f"{d.name}-{k.name}" for d, k in CASES])
def test_reduces_to_the_bit_as_defined(dtype: DType, kind: ReduceKind) -> None:
    random = np.random.default_rng(7)
    ours, theirs = (values(random, dtype) for _ in range(2))
    kernels = RecordKernels(device(), CONTEXT, 4096)
    key = DeviceKey(device(), KEY)
    source, result = to_torch(theirs, dtype), to_torch(ours, dtype)
    wire = wire_for(source.nbytes, 4096)
    kernels.seal(source, key, header(), wire)
    kernels.open_reduce(wire, key, header(), result, (dtype, kind))
    kernels.check()
    with np.errstate(all="ignore"):
        reduce_into(ours, theirs, dtype, kind)
    got = result.cpu().view(torch.uint8).numpy().view(ours.dtype)
    same = got.view(np.uint8) == ours.view(np.uint8)
    if dtype in FLOATS or dtype in COMPLEXES:
        # A NaN result may be any of the many NaNs.
        same |= (nan_bytes(got, dtype)) & (nan_bytes(ours, dtype))
    assert same.all()


def values(random: Any, dtype: DType) -> Any:
    raw = random.integers(0, 256, 1031 * dtype.itemsize, dtype=np.uint8)
    if dtype is DType.BOOL:
        return (raw & 1).view(np.bool_)
    if dtype is DType.BFLOAT16:
        return raw.view(np.uint16)
    return raw.view(np.dtype(dtype.name.lower()))


def to_torch(array: Any, dtype: DType) -> torch.Tensor:
    kind = next(torch_type for torch_type, ours in DTYPES.items() if ours is dtype)
    return torch.from_numpy(array.view(np.uint8).copy()).to(device()).view(kind)


def nan_bytes(array: Any, dtype: DType) -> Any:
    if dtype is DType.BFLOAT16:
        nan = (array & 0x7FFF) > 0x7F80
    elif dtype in COMPLEXES:
        nan = np.isnan(array.view(np.float32 if dtype is DType.COMPLEX64 else np.float64))
        return np.repeat(nan, dtype.itemsize // 2)
    else:
        nan = np.isnan(array)
    return np.repeat(nan, dtype.itemsize)


@pytest.mark.threat("C1")
def test_every_changed_bit_is_seen_and_nothing_is_written() -> None:
    record_bytes, size = 65536, 70001
    plain = os.urandom(size)
    wire = wire_for(size, record_bytes)
    key = DeviceKey(device(), KEY)
    sealer = RecordKernels(device(), CONTEXT, record_bytes)
    sealer.seal(on_gpu(plain), key, header(), wire)
    total = wire_bytes(size, record_bytes)
    spots = [*range(100), *range(65536, 65836), *range(total - 130, total), *range(0, total, 997)]
    for spot in spots:
        forged = wire.clone()
        forged[spot] ^= 1 << spot % 8
        result = torch.full((size,), 0xAA, dtype=torch.uint8, device=device())
        kernels = RecordKernels(device(), CONTEXT, record_bytes)
        kernels.kernels = sealer.kernels
        kernels.open(forged, key, header(), result)
        with pytest.raises(TamperedRecord):
            kernels.check()
        first = spot < record_bytes + 96
        untouched = result[:record_bytes] if first else result[record_bytes:]
        assert bool((untouched == 0xAA).all()), spot


@pytest.mark.parametrize("change", ["context", "count", "segment", "key", "total"])
@pytest.mark.threat("C14")
def test_a_record_opens_only_as_what_it_was_sealed_as(change: str) -> None:
    from dataclasses import replace

    plain = os.urandom(5000)
    wire = wire_for(5000, 4096)
    sealer = RecordKernels(device(), CONTEXT, 4096)
    sealer.seal(on_gpu(plain), DeviceKey(device(), KEY), header(), wire)
    context = bytes(32) if change == "context" else CONTEXT
    key = OTHER_KEY if change == "key" else KEY
    expected = header()
    if change in ("count", "segment", "total"):
        expected = replace(expected, **{change: getattr(expected, change) + 1})
    kernels = RecordKernels(device(), context, 4096)
    result = torch.full((5000,), 0xAA, dtype=torch.uint8, device=device())
    kernels.open(wire, DeviceKey(device(), key), expected, result)
    with pytest.raises(TamperedRecord):
        kernels.check()
    assert bool((result == 0xAA).all())


@pytest.mark.threat("C2")
def test_a_forged_record_is_not_sent_on() -> None:
    plain = torch.randn(2048, device=device())
    wire, further = wire_for(8192, 4096), wire_for(8192, 4096)
    key, other = DeviceKey(device(), KEY), DeviceKey(device(), OTHER_KEY)
    kernels = RecordKernels(device(), CONTEXT, 4096)
    kernels.seal(plain, key, header(), wire)
    wire[200] ^= 1
    kernels.hop((wire, key, header()), plain, (further, other, header()), FLOAT_SUM)
    with pytest.raises(TamperedRecord):
        kernels.check()
    assert bool((further[: 4096 + 96] == 0).all())
