"""How a tensor is cut for sealing, and how errors name a forged record; tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch

from sealring.core.engine.cuda.kernels import RECORD_OVERHEAD, Header, wire_bytes
from sealring.errors import ConfigurationError
from sealring.train.offload.parking import (
    PART_RECORDS,
    RECORD_BYTES,
    dense,
    memory_of,
    parts_of,
    require_on,
    tampered,
)

WHOLE = PART_RECORDS * RECORD_BYTES


@pytest.mark.parametrize(
    "size", [0, 1, RECORD_BYTES, WHOLE - 1, WHOLE, WHOLE + 1, 3 * WHOLE + RECORD_BYTES + 5]
)
def test_parts_are_all_of_a_tensor(size: int) -> None:
    parts = list(parts_of(size))
    plain = sealed = records = 0
    for part in parts:
        assert (part.plain.start, part.sealed.start, part.first) == (plain, sealed, records)
        plain, sealed = part.plain.stop, part.sealed.stop
        assert sealed - part.sealed.start == wire_bytes(plain - part.plain.start, RECORD_BYTES)
        records += (sealed - part.sealed.start - (plain - part.plain.start)) // RECORD_OVERHEAD
    assert (plain, sealed) == (size, wire_bytes(size, RECORD_BYTES))


def header_of(size: int, count: int) -> Header:
    return Header(
        kind=1, sender=0, receiver=0, collective=3, operation=0, dtype=0, reduction=0, algorithm=0,
        message=0, segment=0, total=size, count=count,
    )  # fmt: skip


def test_a_forged_record_is_named_by_its_place_in_the_tensor() -> None:
    header = header_of(WHOLE + 5, count=1000)
    last = 1000 + PART_RECORDS
    assert str(tampered(1000, header)).startswith("record 0 of this tensor is not")
    assert str(tampered(last, header)).startswith(f"record {PART_RECORDS} of this tensor is not")
    for count in (999, last + 1):
        about = f"record {count} of all that were parked, one of another tensor, is not"
        assert str(tampered(count, header)).startswith(about)


@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_what_torch_has_still_to_compute_is_computed(lazy: str) -> None:
    tensor = torch.randn(5, 3, dtype=torch.complex64)
    expected = tensor.conj_physical() if lazy == "conjugate" else -tensor.imag
    given = tensor.conj() if lazy == "conjugate" else tensor.conj().imag
    assert given.is_conj() or given.is_neg()
    found = dense(given)
    again = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype)
    memory_of(again).copy_(memory_of(found))
    assert torch.equal(again, expected)


def test_a_tensor_of_another_device_is_refused() -> None:
    """A device object exists even without the GPU; tests/gpu parks a tensor of the host."""
    gpu = torch.device("cuda", 0)
    for tensor in (torch.ones(3), torch.ones(3, device="meta")):
        with pytest.raises(ConfigurationError, match="cannot be parked from cuda:0"):
            require_on(gpu, tensor)
    require_on(torch.device("cpu"), torch.ones(3))
