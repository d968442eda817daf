"""The models of the demo and the benchmarks: their sizes, causality and determinism."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from sealring.errors import ConfigurationError
from sealring.lab.bench.models import MODELS, ModelShape, build, find, make_model

SMALL = ModelShape(layers=2, width=32, heads=2, context=16)


def parameters(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters())


def test_the_demos_model_has_less_than_a_million_parameters() -> None:
    assert parameters(make_model(ModelShape(), 0)) == 832_256


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-demo", 832_256),
        ("gpt-small", 10_834_944),
        ("mlp", 5_824_522),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_a_model_is_as_large_as_documented(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build(name)
    assert parameters(model) == count
    assert {value.device.type for value in model.parameters()} == {"meta"}


def has_torchvision() -> bool:
    """Tells whether a torchvision is installed that fits this torch."""
    try:
        with torch.device("meta"):
            build("resnet50")
    except ConfigurationError:
        return False
    return True


with_torchvision = pytest.mark.skipif(
    not has_torchvision(), reason="there is no torchvision that fits this torch"
)


@with_torchvision
@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("vgg16", 138_357_544)])
def test_torchvisions_models_are_as_large_as_published(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build(name)
    assert parameters(model) == count


@with_torchvision
def test_torchvisions_models_train_on_images() -> None:
    workload, model = find("resnet50"), build("resnet50")
    inputs, targets = workload.draw(2, torch.Generator().manual_seed(0))
    assert inputs.shape == (2, 3, 224, 224)
    model(inputs, targets).backward()
    assert all(value.grad is not None for value in model.parameters())


def test_without_torchvision_its_models_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigurationError, match="resnet50 is torchvision's, which is not instal"):
        build("resnet50")


def test_gpt2s_shapes_are_the_published_ones() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in build("gpt2").named_parameters()}
    assert shapes["tokens.weight"] == (50257, 768)
    assert shapes["positions.weight"] == (1024, 768)
    block = {name: shape for name, shape in shapes.items() if name.startswith("blocks.0.")}
    assert list(block.values()) == [
        (768,), (768,), (2304, 768), (2304,), (768, 768), (768,),
        (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,),
    ]  # fmt: skip
    assert len(shapes) == 2 + 12 * 12 + 2


@pytest.mark.parametrize("name", ["gpt-demo", "gpt-small", "mlp"])
def test_a_batch_fits_its_model_and_has_a_gradient(name: str) -> None:
    workload, model = find(name), build(name)
    inputs, targets = workload.draw(2, torch.Generator().manual_seed(0))
    assert len(inputs) == 2
    assert inputs[0].numel() == (workload.tokens or 784)
    model(inputs, targets).backward()
    assert all(value.grad is not None for value in model.parameters())


def test_gpt_small_trains_on_512_tokens_a_rank() -> None:
    assert MODELS["gpt-small"].batch * MODELS["gpt-small"].tokens == 512


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'gpt-9' is not a model; there is gpt-demo, gpt-"):
        build("gpt-9")


def test_logits_have_one_value_per_byte_value() -> None:
    inputs = torch.randint(256, (3, SMALL.context))
    assert make_model(SMALL, 0).logits(inputs).shape == (3, SMALL.context, 256)


def test_an_untrained_model_knows_nothing() -> None:
    windows = torch.randint(256, (8, SMALL.context + 1), generator=torch.Generator().manual_seed(0))
    loss = make_model(SMALL, 0)(windows[:, :-1], windows[:, 1:]).item()
    assert abs(loss - math.log(256)) < 0.1


def test_a_byte_does_not_see_those_after_it() -> None:
    model = make_model(SMALL, 0)
    inputs = torch.randint(256, (1, SMALL.context), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model.logits(inputs), model.logits(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-6)


def test_one_seed_makes_one_model() -> None:
    first, second, other = (make_model(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["tokens.weight"], other["tokens.weight"])


def test_making_a_model_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    make_model(SMALL, 1)
    assert torch.equal(torch.rand(4), expected)
