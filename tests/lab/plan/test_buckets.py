"""Buckets as torch makes them, and models by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sealring.errors import ConfigurationError
from sealring.lab.bench.models import build
from sealring.lab.plan.layouts import buckets_of, fill, limits_of
from sealring.lab.plan.models import MODELS, Model, Parameter, from_file, load_model, with_tokens

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mlp": 5_824_522,
    "gpt-small": 10_834_944,
    "gpt-demo": 832_256,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_every_model_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert load_model(name).count == count


def test_every_model_is_checked() -> None:
    assert set(MODELS) == set(COUNTS)


@pytest.mark.parametrize("name", ["gpt-small", "gpt-demo", "gpt2", "mlp"])
def test_shapes_are_those_of_the_benchmarks_models(name: str) -> None:
    with torch.device("meta"):
        module = build(name)
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    assert shapes == [parameter.shape for parameter in load_model(name).parameters]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", [13, 5, 2, 2]),
        ("gpt2-medium", [37, 12, 4, 3]),
        ("gpt2-large", [109, 28, 8, 4]),
        ("gpt2-xl", [145, 49, 15, 7]),
    ],
)
def test_all_reduces_of_gpt2_by_bucket_size(name: str, expected: list[int]) -> None:
    """The first bucket has 1 MiB; the caps are 25, 100, 400 and 1000 MB."""
    sizes = [4 * parameter.count for parameter in reversed(load_model(name).parameters)]
    caps = (25, 100, 400, 1000)
    assert [len(fill(sizes, (1 << 20, cap << 20))) for cap in caps] == expected


@pytest.mark.parametrize("cap", [None, 0.5, 1.0, 5.0, 25.0, 100.0])
@pytest.mark.parametrize("name", ["resnet50", "gpt-small", "mlp"])
def test_buckets_are_those_that_torch_makes(name: str, cap: float | None) -> None:
    import torch
    import torch.distributed as dist

    gradients = [
        torch.empty(parameter.shape, device="meta")
        for parameter in reversed(load_model(name).parameters)
    ]
    limits = limits_of(cap)
    theirs, _ = dist._compute_bucket_assignment_by_size(gradients, list(limits))
    sizes = [gradient.numel() * 4 for gradient in gradients]
    assert fill(sizes, limits) == [list(bucket) for bucket in theirs]


def test_buckets_hold_every_gradient_once_and_the_last_is_ready_last() -> None:
    model = load_model("gpt2")
    for cap in (None, 1.0, 25.0, 10_000.0):
        buckets = buckets_of(model, cap, 4)
        assert sum(bucket.bytes for bucket in buckets) == 4 * model.count
        ready = [bucket.ready for bucket in buckets]
        assert ready == sorted(ready)
        assert ready[-1] == pytest.approx(1.0)


def test_a_tied_embedding_is_computed_first_and_ready_last() -> None:
    tied = Parameter("embedding", (10, 10), uses=1.0, tied=True)
    model = Model("two", (tied, Parameter("layer", (10, 10))))
    assert model.ready_fractions() == [1.0, 1.0]
    loose = Model("two", (Parameter("embedding", (10, 10)), Parameter("layer", (10, 10))))
    assert loose.ready_fractions() == [0.5, 1.0]


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bucket_without_room_is_refused(cap: float) -> None:
    with pytest.raises(ConfigurationError, match="holds no gradient: it is a number above 0"):
        limits_of(cap)


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="'gpt9' is not a model; there is gpt2, "):
        load_model("gpt9")


def test_a_parameter_list_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"a.weight": [3, 4], "a.bias": [3], "scale": []}))
    model = load_model(str(path))
    assert [parameter.name for parameter in model.parameters] == ["a.weight", "a.bias", "scale"]
    assert model.count == 12 + 3 + 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a JSON list of parameters"),
        ("[" * 100_000, "is not a JSON list of parameters"),
        ("{}", "lists no parameters"),
        ("3", "lists no parameters"),
        ('{"w": 3}', "w has no shape"),
        ('{"w": [0]}', "w has no shape"),
        ('{"w": [1.5]}', "w has no shape"),
        ('{"w": [true]}', "w has no shape"),
        ('{"w": [1000000000, 1000000000]}', "w has no shape"),
    ],
)
def test_what_is_no_parameter_list_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=sentence):
        from_file(path)


def test_tokens_multiply_the_arithmetic_of_models_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"w": [10, 10]}')
    assert load_model(str(path)).forward_flops == 200
    assert with_tokens(load_model(str(path)), 512).forward_flops == 200 * 512
    with pytest.raises(ConfigurationError, match="what gpt2 computes is known"):
        with_tokens(load_model("gpt2"), 512)
    with pytest.raises(ConfigurationError, match="0 tokens in a sample"):
        with_tokens(load_model(str(path)), 0)


def test_blocks_are_found_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    names = ["embed.w", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "head.w", "head.b"]
    path.write_text(json.dumps({name: [2] for name in names}))
    assert load_model(str(path)).blocks == ((0, 1), (1, 3), (3, 5), (5, 7))


def test_a_model_of_ones_own_is_built_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_planned.py").write_text(
        "import torch\n"
        "def huge():\n"
        "    big, small = torch.nn.Linear(1 << 20, 1 << 20), torch.nn.Linear(4, 4)\n"
        "    model = torch.nn.Sequential(big, small)\n"
        "    model[1].requires_grad_(False)\n"
        "    return model\n"
        "nothing = lambda: 3\n"
        "def broken():\n"
        "    raise ValueError('no such layer')\n"
    )
    monkeypatch.chdir(tmp_path)
    model = load_model("mine_planned:huge")
    assert model.count == (1 << 40) + (1 << 20)
    with pytest.raises(ConfigurationError, match=r"returned a int, no torch\.nn\.Module"):
        load_model("mine_planned:nothing")
    with pytest.raises(ConfigurationError, match="made no model: ValueError: no such layer"):
        load_model("mine_planned:broken")
    with pytest.raises(ConfigurationError, match="made no model: ModuleNotFoundError"):
        load_model("there_is_none:model")


def test_a_list_says_how_often_a_sample_uses_a_parameter(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"batch": 3, "parameters": {"a.weight": {"shape": [4, 4], "uses": 7}, "b": [2]}}'
    )
    model = load_model(str(path))
    assert (model.batch, model.forward_flops) == (3, 2.0 * 16 * 7 + 2.0 * 2)
    for wrong in ('{"batch": 0, "parameters": {"a": [1]}}', '{"size": 1, "parameters": [[1]]}'):
        path.write_text(wrong)
        with pytest.raises(ConfigurationError, match="beside the parameters are batch and"):
            load_model(str(path))
    path.write_text('{"a": {"shape": [1], "uses": 0}}')
    with pytest.raises(ConfigurationError, match="a has no shape"):
        load_model(str(path))
