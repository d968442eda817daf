"""The models that have a name, with the shapes of bench/models.py; the tests compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from sealring.plan.model import Model, Parameter, Transformer


def _gpt(
    name: str, layers: int, width: int, heads: int, context: int, vocabulary: int, tokens: int,
    *, attention_bias: bool, batch: int,
) -> Model:  # fmt: skip
    used = float(tokens)

    def linear(prefix: str, out: int, into: int, bias: bool = True) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.weight", (out, into), used)
        if bias:
            yield Parameter(f"{prefix}.bias", (out,), used)

    parameters = [
        Parameter("tokens.weight", (vocabulary, width), used, tied=True),
        Parameter("positions.weight", (context, width), 0.0),
    ]
    blocks = [(0, 2)]
    for layer in range(layers):
        start, at = len(parameters), f"blocks.{layer}"
        parameters += [Parameter(f"{at}.before_attention.{p}", (width,), used) for p in _NORM]
        parameters += linear(f"{at}.attention.query_key_value", 3 * width, width, attention_bias)
        parameters += linear(f"{at}.attention.out", width, width, attention_bias)
        parameters += [Parameter(f"{at}.before_mlp.{p}", (width,), used) for p in _NORM]
        parameters += linear(f"{at}.mlp.0", 4 * width, width)
        parameters += linear(f"{at}.mlp.2", width, 4 * width)
        blocks.append((start, len(parameters)))
    parameters += [Parameter(f"last.{p}", (width,), used) for p in _NORM]
    blocks.append((len(parameters) - 2, len(parameters)))
    return Model(
        name,
        tuple(parameters),
        Transformer(layers, width, heads, tokens, vocabulary),
        # 34 bytes per token, width and layer at 2 bytes a value, with attention that is not kept
        # (Korthikanti and others, arXiv 2205.05198, table 2), and the logits.
        activation_values=tokens * (17.0 * width * layers + 2.0 * vocabulary),
        extra_flops=4.0 * layers * tokens * tokens * width,
        batch=batch,
        blocks=tuple(blocks),
    )


_NORM: Final = ("weight", "bias")


def _gpt2(name: str, layers: int, width: int, heads: int) -> Callable[[], Model]:
    return lambda: _gpt(name, layers, width, heads, 1024, 50257, 1024, attention_bias=True, batch=1)


def _conv(name: str, into: int, out: int, kernel: int, side: int, bias: bool) -> list[Parameter]:
    """A convolution whose output is `side` x `side`."""
    found = [Parameter(f"{name}.weight", (out, into, kernel, kernel), float(side * side))]
    return [*found, Parameter(f"{name}.bias", (out,), float(side * side))] if bias else found


def _batch_norm(name: str, width: int, side: int) -> list[Parameter]:
    return [Parameter(f"{name}.{p}", (width,), float(side * side)) for p in _NORM]


def _resnet50() -> Model:
    """As torchvision registers it; 224 x 224 pixels."""
    parameters = [*_conv("conv1", 3, 64, 7, 112, False), *_batch_norm("bn1", 64, 112)]
    blocks = [(0, len(parameters))]
    kept, into, side = 2 * 64 * 112.0**2, 64, 56
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for number in range(count):
            start, at = len(parameters), f"layer{stage}.{number}"
            before = side
            if number == 0 and stage > 1:
                side //= 2
            # The stride is in the second convolution, so the first works at the earlier size.
            for place, (a, b, kernel, size) in enumerate(
                ((into, width, 1, before), (width, width, 3, side), (width, 4 * width, 1, side)),
                start=1,
            ):
                parameters += _conv(f"{at}.conv{place}", a, b, kernel, size, False)
                parameters += _batch_norm(f"{at}.bn{place}", b, size)
                kept += 2.0 * b * size * size
            if number == 0:
                parameters += _conv(f"{at}.downsample.0", into, 4 * width, 1, side, False)
                parameters += _batch_norm(f"{at}.downsample.1", 4 * width, side)
                kept += 2.0 * 4 * width * side * side
            into = 4 * width
            blocks.append((start, len(parameters)))
    parameters += [Parameter("fc.weight", (1000, 2048)), Parameter("fc.bias", (1000,))]
    blocks.append((len(parameters) - 2, len(parameters)))
    return Model(
        "resnet50", tuple(parameters), activation_values=kept, batch=32, blocks=tuple(blocks)
    )


def _vgg16() -> Model:
    """As torchvision registers it; 224 x 224 pixels."""
    parameters: list[Parameter] = []
    into, side, place, kept = 3, 224, 0, 0.0
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            parameters += _conv(f"features.{place}", into, width, 3, side, True)
            kept += 2.0 * width * side * side
            into, place = width, place + 2
        side, place = side // 2, place + 1
    for place, (out, width) in zip(
        (0, 3, 6), ((4096, 25088), (4096, 4096), (1000, 4096)), strict=True
    ):
        parameters += [
            Parameter(f"classifier.{place}.weight", (out, width)),
            Parameter(f"classifier.{place}.bias", (out,)),
        ]
    blocks = tuple((first, first + 2) for first in range(0, len(parameters), 2))
    return Model("vgg16", tuple(parameters), activation_values=kept, batch=32, blocks=blocks)


def _mlp() -> Model:
    parameters: list[Parameter] = []
    for place, (out, into) in zip((0, 2, 4), ((2048, 784), (2048, 2048), (10, 2048)), strict=True):
        parameters += [
            Parameter(f"network.{place}.weight", (out, into)),
            Parameter(f"network.{place}.bias", (out,)),
        ]
    return Model("mlp", tuple(parameters), activation_values=2.0 * 4106 + 784, batch=64)


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "gpt2": _gpt2("gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 48, 1600, 25),
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "mlp": _mlp,
    "gpt-small": lambda: _gpt("gpt-small", 6, 384, 6, 256, 256, 256, attention_bias=False, batch=2),
    "gpt-demo": lambda: _gpt("gpt-demo", 4, 128, 4, 64, 256, 64, attention_bias=False, batch=8),
}
"""By the name that `sealring plan` takes."""
