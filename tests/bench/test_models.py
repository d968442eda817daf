"""The GPT of the demo and the benchmarks: its sizes, its causality, its determinism."""

from __future__ import annotations

import math

import torch

from sealring.bench.models import GPT, MODELS, Shape, make_model

SMALL = Shape(layers=2, width=32, heads=2, context=16)


def parameters(model: GPT) -> int:
    return sum(value.numel() for value in model.parameters())


def test_the_demos_model_has_less_than_a_million_parameters() -> None:
    assert parameters(make_model(Shape(), 0)) == 832_256


def test_gpt_small_is_as_large_as_documented() -> None:
    load = MODELS["gpt-small"]
    assert parameters(make_model(load.shape, 0)) == 10_834_944
    assert load.batch * load.shape.context == 512


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
