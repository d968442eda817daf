"""Tensors of a GPU in host memory: they return unchanged, as ciphertext, and never if changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sealring.core.engine.cuda.kernels import RECORD_OVERHEAD
from sealring.errors import ConfigurationError, TamperedRecord
from sealring.train.offload import OffloadedOptimizer, Parking, offload_saved_tensors
from sealring.train.offload.parking import PART_RECORDS, RECORD_BYTES


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (1 << 16,), (1 << 20,), (777, 1023)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_tensor_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parking = Parking("cuda")
    tensor = torch.randint(-100, 100, shape, device="cuda").to(dtype)
    parked = parking.park(tensor)
    expected = tensor.clone()
    tensor.zero_()  # at once: parking kept the content from before
    for _ in range(2):
        found = parking.fetch(parked)
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@pytest.mark.threat("V4")
def test_host_memory_has_no_plaintext() -> None:
    parking = Parking("cuda")
    tensor = torch.full((1 << 18,), 7, dtype=torch.uint8, device="cuda")
    one, other = parking.park(tensor), parking.park(tensor)
    torch.cuda.synchronize()
    assert bytes([7] * 8) not in one.host.numpy().tobytes()
    assert not torch.equal(one.host[80:], other.host[80:]), "a nonce was used twice"


@pytest.mark.parametrize("record", [0, 3, PART_RECORDS, 2 * PART_RECORDS + 1])
@pytest.mark.threat("V4")
def test_changed_host_memory_is_refused(record: int) -> None:
    """The error names the record within the tensor, whichever part contains it."""
    parking = Parking("cuda")
    before, parked = (
        parking.park(torch.ones((2 * PART_RECORDS + 2) * RECORD_BYTES // 4, device="cuda"))
        for _ in range(2)
    )
    torch.cuda.synchronize()
    parked.host[record * (RECORD_BYTES + RECORD_OVERHEAD) + 300] ^= 1
    parking.fetch(before)
    with pytest.raises(TamperedRecord, match=f"^record {record} of this tensor is not what"):
        parking.fetch(parked)
    with pytest.raises(TamperedRecord, match=r"one of another tensor, is not what"):
        parking.fetch(before)


def test_a_conjugate_comes_back() -> None:
    parking = Parking("cuda")
    tensor = torch.randn(5, 3, dtype=torch.complex64, device="cuda").conj()
    assert torch.equal(parking.fetch(parking.park(tensor)), tensor)


@pytest.mark.threat("V4")
def test_an_older_content_is_refused() -> None:
    parking = Parking("cuda")
    old = parking.park(torch.zeros(1 << 10, device="cuda"))
    new = parking.park(torch.ones(1 << 10, device="cuda"))
    torch.cuda.synchronize()
    new.host.copy_(old.host)
    with pytest.raises(TamperedRecord):
        parking.fetch(new)


def test_only_gpus_park() -> None:
    with pytest.raises(ConfigurationError, match="cpu is none"):
        Parking("cpu")


def test_a_tensor_of_the_host_is_not_parked() -> None:
    with pytest.raises(ConfigurationError, match="a tensor on cpu cannot be parked"):
        Parking("cuda").park(torch.ones(3))


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(512, 512), torch.nn.GELU()]
    return torch.nn.Sequential(*layers).cuda()


def trained(optimizer_of: Any, steps: int = 5, around: Any = None) -> list[torch.Tensor]:
    model = model_of()
    optimizer = optimizer_of(model)
    for step in range(steps):
        torch.manual_seed(step)
        batch = torch.randn(64, 512, device="cuda")
        if around is None:
            loss = model(batch).square().mean()
        else:
            with around():
                loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3)


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return adam([{"params": list(model.parameters())}])


def offloaded(model: torch.nn.Module) -> OffloadedOptimizer:
    return OffloadedOptimizer(model.parameters(), adam, Parking("cuda"), bucket_bytes=2 << 20)


def test_an_offloaded_optimizer_trains_to_the_bit() -> None:
    for one, other in zip(trained(plain), trained(offloaded), strict=True):
        assert torch.equal(one, other)


def test_between_steps_the_state_is_in_host_memory_alone() -> None:
    model = model_of()
    optimizer = offloaded(model)
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert torch.cuda.memory_allocated() - before < state / 2


def test_schedulers_and_state_dicts() -> None:
    def resumed(model: torch.nn.Module) -> Any:
        optimizer = offloaded(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        class Both:
            def step(self) -> None:
                nonlocal optimizer
                optimizer.step()
                scheduler.step()
                saved = optimizer.state_dict()
                fresh = offloaded(model)
                fresh.load_state_dict(saved)
                optimizer = fresh
                scheduler.optimizer = fresh

            def zero_grad(self) -> None:
                optimizer.zero_grad()

        return Both()

    def scheduled(model: torch.nn.Module) -> Any:
        optimizer = plain(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        class Both:
            def step(self) -> None:
                optimizer.step()
                scheduler.step()

            def zero_grad(self) -> None:
                optimizer.zero_grad()

        return Both()

    for one, other in zip(trained(scheduled), trained(resumed), strict=True):
        assert torch.equal(one, other)


def test_parked_activations_train_to_the_bit() -> None:
    parking = Parking("cuda")

    def around() -> Any:
        return offload_saved_tensors(parking, smallest_bytes=1 << 10)

    for one, other in zip(trained(plain), trained(plain, around=around), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("view", ["t", "narrow", "expand", "channels_last"])
def test_a_tensor_comes_back_as_it_lay_in_memory(view: str) -> None:
    base = torch.randn(8, 4, 6, 10, device="cuda")
    tensor = {
        "t": base.transpose(0, 3),
        "narrow": base[:, 1:3],
        "expand": base[:, :1].expand(8, 4, 6, 10),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
    }[view]
    parking = Parking("cuda")
    found = parking.fetch(parking.park(tensor))
    assert torch.equal(found, tensor)
    if view in ("t", "channels_last"):
        assert found.stride() == tensor.stride()
