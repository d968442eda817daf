"""What a person may write after `sealring bench`, and what is said of what they may not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from sealring.bench.gpu.groups import SETTABLE, WIRES
from sealring.bench.place import CPU, Place
from sealring.bench.suite import GPU_PARTS
from sealring.bench.trainee import WIDTHS, Precision, count_of, training_bytes
from sealring.cli.sizes import parse_bytes
from sealring.errors import ConfigurationError
from sealring.group.cores import usable_cores

if TYPE_CHECKING:
    from sealring.bench.step import Setting

_MAX_RANKS: Final = 64
_MAX_BUCKET_MB: Final = 1 << 20
VARIANTS: Final = ("compute", "plain", "sealed", "cc")

Value = TypeVar("Value")
Transport = Annotated[str, typer.Option(help="shm or tcp.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def several(text: str, one: Callable[[str], Value]) -> list[Value]:
    """The values of a list with commas, each once."""
    return list(dict.fromkeys(one(part.strip()) for part in text.split(",")))


def parse_size(text: str) -> int:
    """Bytes, as parse_bytes reads them; a multiple of 4, as the benchmark reduces float32."""
    size = parse_bytes(text)
    if size % 4:
        raise ConfigurationError(f"a size of {size} bytes is not a whole number of float32 values")
    return size


def parse_world_sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigurationError(f"{text!r} is not a list of world sizes; write 2,3,4,8")
    return several(text, lambda part: check_ranks(int(part)))


def check_ranks(ranks: int) -> int:
    if not 2 <= ranks <= _MAX_RANKS:
        raise ConfigurationError(f"{ranks} ranks: the benchmark runs 2 to {_MAX_RANKS} of them")
    return ranks


def check_threads(threads: int | None) -> int | None:
    """The workers would refuse the same, one by one."""
    if threads is not None and threads > usable_cores():
        raise ConfigurationError(
            f"{threads} threads on a machine on which this process may use {usable_cores()} cores"
        )
    return threads


def check_transport(transport: str) -> str:
    if transport not in ("shm", "tcp"):
        raise ConfigurationError(f"--transport is {transport!r}; it must be shm or tcp")
    return transport


def parse_variants(text: str) -> tuple[str, ...]:
    """Those that were asked for, in one order. Without `sealed` there is nothing to compare."""

    def one(name: str) -> str:
        if name not in VARIANTS:
            raise ConfigurationError(f"{name!r} is not a variant; there is {', '.join(VARIANTS)}")
        return name

    wanted = {*several(text, one), "sealed"}
    return tuple(name for name in VARIANTS if name in wanted)


def parse_bucket(text: str) -> float:
    try:
        bucket = float(text)
    except ValueError:
        bucket = 0.0
    if not 0 < bucket <= _MAX_BUCKET_MB:
        raise ConfigurationError(
            f"a bucket of {text!r} MB holds no gradient; DDP's own default is 25"
        )
    return bucket


def parse_batch(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ConfigurationError(f"a batch of {text!r} samples cannot be trained; write 1 or more")
    return int(text)


def parse_precision(text: str) -> Precision:
    if text not in WIDTHS:
        raise ConfigurationError(f"{text!r} is not a precision; there is {', '.join(WIDTHS)}")
    return text


def settings_of(
    models: Sequence[str],
    batches: Sequence[int] | None,
    precisions: Sequence[Precision],
    buckets: Sequence[float],
) -> tuple[Setting, ...]:
    from sealring.bench.models import find
    from sealring.bench.step import Setting

    return tuple(
        Setting(model, batch, precision, bucket)
        for model in models
        for batch in batches or [find(model).batch]
        for precision in precisions
        for bucket in buckets
    )


def check_memory(
    settings: Sequence[Setting], ranks: int, trainees: int, place: Place = CPU
) -> None:
    """Refuses what would run out of memory after minutes of work."""
    available = place.free_bytes()
    on_gpu = place.kind == "cuda"
    together = -(-ranks // place.gpus) if on_gpu else ranks
    where = f" of one {place.name}" if on_gpu else ""
    fewer = ", a smaller model, or --variants plain,sealed"
    way_out = fewer if trainees > 1 else " or a smaller model"
    for setting in settings:
        parameters = count_of(setting.model)
        needed = together * trainees * training_bytes(setting.model, setting.precision)
        if needed > available:
            raise ConfigurationError(
                f"{together} ranks of {setting.model} ({parameters:,} parameters, {trainees} "
                f"variants at once) need {needed / 2**30:.1f} GiB{where} and "
                f"{available / 2**30:.1f} GiB are free: take fewer ranks{way_out}"
            )


def check_variants(variants: Sequence[str], place: Place) -> None:
    if place.kind == "cuda" and "cc" in variants:
        raise ConfigurationError(
            "cc emulates the GPU-TEE path on CPUs and has no GPU: leave it out of --variants, or "
            "take --device cpu"
        )


def check_wire(wire: str) -> str:
    """As SEALRING_GPU_WIRE may be."""
    return _one_of(("auto", *SETTABLE), wire, "a wire")


def check_own_wire(wire: str) -> str:
    return _one_of(WIRES, wire, "a wire")


def check_part(part: str) -> str:
    return _one_of(GPU_PARTS, part, "a part")


def check_gpt2(model: str) -> str:
    from sealring.bench.models import MODELS

    return _one_of([name for name in MODELS if name.startswith("gpt2")], model, "a GPT-2")


def _one_of(known: Sequence[str], name: str, what: str) -> str:
    if name not in known:
        raise ConfigurationError(f"{name!r} is not {what}; there is {', '.join(known)}")
    return name


def check_writable(path: Path | None) -> Path | None:
    """Refused now, not after the measurement."""
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: there is no directory {path.parent}")
    return path
