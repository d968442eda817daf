"""No branch and no address of the GPU's cipher depends on a secret, on the GPU and on the CPU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from tests.constant_time import kernels, twin
from tests.constant_time.kernels import CONTEXT, COUNT, KEY, LANE, Run, Shape, header_of

needs_valgrind = pytest.mark.skipif(bool(twin.missing()), reason=twin.missing() or "-")
needs_nvcc = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

# Empty, a tail alone, whole blocks, both; memory that is not aligned; several turns; several parts.
SHAPES = (
    Shape(0),
    Shape(37),
    Shape(128),
    Shape(1000, misaligned=3),
    Shape(64 * 130 + 5, log_turns=1),
    Shape(64 * 140 + 21, parts=2),
)
FIRST_OF_THE_HEADER = (
    "  const OneTimeKey key = slow_one_time_key(side.key, nonce_of(wire, at, kHeaderLane), "
    "launch.one);"
)
KEY_BRANCH = (
    FIRST_OF_THE_HEADER,
    "  if (side.key[3] & 4) side.header_tag[0] = *(volatile u32*)launch.failed;\n"
    + FIRST_OF_THE_HEADER,
)
KEY_ADDRESS = (
    "  side.associated = hash_associated(side, key.r);",
    "  side.associated = hash_associated(side, key.r);\n"
    "  side.tail[0] = side.associated_words[side.key[0] & 7];",
)


@needs_valgrind
@pytest.mark.parametrize("level", twin.LEVELS)
@pytest.mark.parametrize("compiler", twin.COMPILERS)
def test_the_cpus_compilation(tmp_path: Path, compiler: str, level: str) -> None:
    if compiler not in twin.compilers():
        pytest.skip(f"{compiler} is not installed")
    outcome = twin.run_twin(tmp_path, compiler, level)
    assert not outcome.leaks, outcome.output
    assert "sealed and opened" in outcome.output


@needs_valgrind
@pytest.mark.parametrize("planted", ["PLANTED_BRANCH", "PLANTED_ADDRESS"])
def test_a_leak_in_the_cpus_compilation_is_found(tmp_path: Path, planted: str) -> None:
    outcome = twin.run_twin(tmp_path, twin.compilers()[0], "-O3", planted)
    assert outcome.leaks, outcome.output


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kernels.compiled(tmp_path_factory.mktemp("ptx"))


def expected_record(shape: Shape, plain: bytes | None = None) -> bytes:
    header, plain = header_of(shape), shape.plain if plain is None else plain
    cipher, associated = ChaCha20Poly1305(KEY), header + CONTEXT
    tag = cipher.encrypt(struct.pack("<IQ", LANE | 1 << 31, COUNT), b"", associated)
    payload = cipher.encrypt(struct.pack("<IQ", LANE, COUNT), plain, associated)
    return header + tag + payload


@needs_nvcc
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gpus_code(ptx: str, shape: Shape) -> None:
    sealing = Run(ptx, shape)
    record = sealing.seal()
    assert record == expected_record(shape)
    assert not sealing.leaks
    opening = Run(ptx, shape)
    assert opening.open(record) == shape.plain
    assert not opening.leaks


@needs_nvcc
def test_the_gpus_code_that_opens_and_seals(tmp_path: Path) -> None:
    """With a sum of int32 in between."""
    ptx = kernels.compiled(tmp_path, kernels.INT32_SUM)
    for shape in (Shape(64 * 3 + 20), Shape(64 * 2, misaligned=4)):
        words = struct.unpack(f"<{shape.bytes // 4}I", shape.plain)
        doubled = struct.pack(f"<{shape.bytes // 4}I", *(2 * word & 0xFFFFFFFF for word in words))
        hop = Run(ptx, shape)
        assert hop.hop(expected_record(shape)) == expected_record(shape, doubled)
        assert not hop.leaks


@needs_nvcc
@pytest.mark.parametrize("at", [20, 64, -1])
def test_the_gpus_code_with_a_forged_record(ptx: str, at: int) -> None:
    record = bytearray(expected_record(Shape(200)))
    record[at] ^= 1
    opening = Run(ptx, Shape(200))
    assert opening.open(bytes(record)) is None
    assert opening.forged == COUNT, "a launch's own number would name several records"
    assert not opening.leaks


@needs_nvcc
@pytest.mark.parametrize(("planted", "kind"), [(KEY_BRANCH, "branch"), (KEY_ADDRESS, "address")])
def test_a_leak_in_the_gpus_code_is_found(
    tmp_path: Path, planted: tuple[str, str], kind: str
) -> None:
    sealing = Run(kernels.compiled(tmp_path, planted=planted), Shape(128))
    sealing.seal()
    assert kind in {leak.what for leak in sealing.leaks}
