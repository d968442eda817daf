"""`sealring bench`: what protection costs on this machine."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from sealring.bench.allreduce import Result, measure_allreduce
from sealring.bench.collectives import (
    COLLECTIVES,
    LARGE_BYTES,
    OF_FLOOR,
    OF_GLOO,
    SMALL_BYTES,
    Case,
    measure_collectives,
    plan_of,
)
from sealring.bench.handshake import measure_handshake
from sealring.bench.step import Result as StepResult
from sealring.bench.step import measure_step
from sealring.cli.terminal import console, errors, human_bytes, print_json, progress_bar
from sealring.errors import ConfigurationError

app = typer.Typer(help="Measure what protection costs on this machine.", no_args_is_help=True)

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MAX_RANKS = 64


def parse_size(text: str) -> int:
    """Bytes in "4096", "4KiB" or "25MiB"; a multiple of 4, as the benchmark reduces float32."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(f"{text!r} is not a size; write bytes, or 4KiB, 25MiB, 1GiB")
    size = int(match[1]) * unit
    if size == 0 or size % 4:
        raise ConfigurationError(f"a size of {size} bytes is not a whole number of float32 values")
    return size


def parse_world_sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigurationError(f"{text!r} is not a list of world sizes; write 2,3,4,8")
    return [check_ranks(int(part)) for part in text.split(",")]


def check_ranks(ranks: int) -> int:
    if not 2 <= ranks <= _MAX_RANKS:
        raise ConfigurationError(f"{ranks} ranks: the benchmark runs 2 to {_MAX_RANKS} of them")
    return ranks


def check_transport(transport: str) -> None:
    if transport not in ("shm", "tcp"):
        raise ConfigurationError(f"--transport is {transport!r}; it must be shm or tcp")


def check_model(name: str) -> None:
    from sealring.bench.models import MODELS

    if name not in MODELS:
        raise ConfigurationError(f"--model is {name!r}; there is {', '.join(MODELS)}")


@app.callback()
def bench() -> None:
    """Measure what protection costs on this machine."""


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 2,
    size: Annotated[str, typer.Option(help="Tensor size: 4096, 4KiB, 25MiB.")] = "25MiB",
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    world_sizes: Annotated[
        str | None, typer.Option(help="Several numbers of ranks, e.g. 2,3,4,8.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=3, help="Timed blocks of each variant.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Sealed all-reduce against torch's plaintext Gloo, alternately in one run (medians)."""
    check_transport(transport)
    worlds = parse_world_sizes(world_sizes) if world_sizes else [check_ranks(ranks)]
    size_bytes = parse_size(size)
    results = []
    with progress_bar() as bar:
        for world in worlds:
            task = bar.add_task(f"{world} ranks, {human_bytes(size_bytes)}, {transport}", total=1.0)
            results.append(
                measure_allreduce(
                    world,
                    size_bytes,
                    transport,
                    blocks=blocks,
                    progress=partial(_advance, bar, task),
                )
            )
    if json:
        rows = [result.as_json() for result in results]
        print_json({"cases": rows} if world_sizes else rows[0])
        return
    console.print(_table(results))


@app.command()
def collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of workers on this machine.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Tensor sizes: 4096, 4KiB, 25MiB.")] = "4KiB,25MiB",
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    only: Annotated[
        str | None, typer.Option(help="Some of them, e.g. all_reduce,send_recv.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=3, help="Timed blocks of each variant.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Every collective against torch's plaintext Gloo and against what its AES alone takes."""
    check_transport(transport)
    names = [name.strip() for name in only.split(",")] if only else list(COLLECTIVES)
    size_bytes = [parse_size(size) for size in sizes.split(",")]
    worlds = {world: plan_of(names, world, size_bytes) for world in parse_world_sizes(ranks)}
    cases: list[Case] = []
    with progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
        task = bar.add_task("starting", total=sum(map(len, worlds.values())))
        for world, plan in worlds.items():
            labels = [f"{name}, {world} ranks, {human_bytes(size)}" for name, size in plan]
            bar.update(task, description=labels[0])
            for number, case in enumerate(
                measure_collectives(
                    names,
                    world,
                    size_bytes,
                    transport,
                    blocks=blocks,
                    progress=lambda part: bar.update(task, completed=len(cases) + part),
                ),
                start=1,
            ):
                cases.append(case)
                bar.update(task, description=labels[min(number, len(labels) - 1)])
    if json:
        print_json({"cases": [case.as_json() for case in cases]})
        return
    console.print(_collectives_table(cases))


@app.command()
def handshake(
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 16,
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """How long a group takes to form: mutual TLS 1.3 between every two ranks."""
    check_transport(transport)
    with errors.status(f"{check_ranks(ranks)} workers start and meet"):
        result = measure_handshake(ranks, transport)
    if json:
        print_json(result.as_json())
        return
    table = Table(title="Forming a group")
    for column in ("ranks", "links", "transport", "slowest rank", "per link"):
        table.add_column(column, justify="right")
    table.add_row(
        str(result.ranks),
        str(result.links),
        result.transport,
        f"{result.seconds:.2f} s",
        f"{result.seconds_per_link * 1e3:.1f} ms",
    )
    console.print(table)


@app.command()
def step(
    model: Annotated[str, typer.Option(help="gpt-small or gpt-demo.")] = "gpt-small",
    ranks: Annotated[str, typer.Option(help="Numbers of workers on this machine.")] = "2,4",
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each variant.")] = 11,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of one sealed step on rank 0; for one --ranks."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """A DDP training step, sealed against torch's plaintext Gloo, alternately (medians)."""
    worlds = parse_world_sizes(ranks)
    check_model(model)
    if trace is not None and len(worlds) > 1:
        raise ConfigurationError(f"one trace shows one world: pass --ranks {worlds[0]}")
    results = []
    with progress_bar() as bar:
        for world in worlds:
            task = bar.add_task(f"{model}, {world} ranks", total=1.0)
            results.append(
                measure_step(
                    model, world, steps=steps, trace=trace, progress=partial(_advance, bar, task)
                )
            )
    if json:
        print_json({"cases": [result.as_json() for result in results]})
        return
    console.print(_step_table(results))


@app.command()
def gpu(
    only: Annotated[
        str, typer.Option(help="Parts of it: kernels, allreduce, step.")
    ] = "kernels,allreduce,step",
    ranks: Annotated[str, typer.Option(help="Numbers of workers, all on one GPU.")] = "2,4",
    models: Annotated[
        str, typer.Option(help="What is trained.")
    ] = "gpt2-124m,gpt2-355m,gpt2-1558m",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Sealing by the GPU that holds the tensor: its kernels, collectives and training steps."""
    from sealring.bench.gpu import PARTS, measure_gpu

    check_gpu()
    parts = tuple(only.split(","))
    if not set(parts) <= set(PARTS):
        raise ConfigurationError(f"--only is {only!r}; its parts are {', '.join(PARTS)}")
    rows = []
    with errors.status("starting") as status:
        for row in measure_gpu(parts, tuple(parse_world_sizes(ranks)), tuple(models.split(","))):
            rows.append(row)
            status.update(f"{row.what}: {row.value:,} {row.unit}")
    if json:
        print_json({"device": gpu_name(), "rows": [row.as_json() for row in rows]})
        return
    table = Table(title=f"Sealed on {gpu_name()}")
    for column in ("what", "measured", "bar", "met"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_column("detail", style="dim")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for row in rows:
        bar = (
            f"≥ {row.at_least:g}" if row.at_least else f"≤ {row.at_most:g}" if row.at_most else "-"
        )
        table.add_row(row.what, f"{row.value:,} {row.unit}", bar, marks[row.met], row.detail)
    console.print(table)


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError("there is no GPU here that torch can use: bench gpu needs one")


def gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name(0))


def _advance(bar: Progress, task: TaskID, part: float) -> None:
    bar.update(task, completed=part)


def _table(results: list[Result]) -> Table:
    table = Table(title="All-reduce: sealed by sealring, plaintext by Gloo (medians)")
    table.add_column("ranks", justify="right")
    table.add_column("size", justify="right")
    table.add_column("transport")
    table.add_column("sealed", justify="right")
    table.add_column("Gloo", justify="right")
    table.add_column("sealed : Gloo", justify="right", style="bold")
    table.add_column("sealed a rank", justify="right")
    for result in results:
        table.add_row(
            str(result.ranks),
            human_bytes(result.bytes),
            result.transport,
            f"{result.sealed_us:,.0f} µs ±{result.sealed_spread:.0%}",
            f"{result.gloo_us:,.0f} µs ±{result.gloo_spread:.0%}",
            f"{result.ratio:.3f}",
            human_bytes(result.sealed_bytes),
        )
    return table


def _collectives_table(cases: list[Case]) -> Table:
    met = [case.meets_bar for case in cases if case.meets_bar is not None]
    table = Table(
        title=f"Collectives over {cases[0].transport}: sealed by sealring, plaintext by Gloo "
        "(medians of the slowest rank's times)",
        caption=f"floor: what the busiest core seals and opens, at the "
        f"{min(case.aes_bytes_per_s for case in cases) / 1e9:.2f} GB/s of AES-256-GCM that one "
        f"core does here. Bar: up to {human_bytes(SMALL_BYTES)} Gloo's time; from "
        f"{human_bytes(LARGE_BYTES)} on, in shared memory, {OF_GLOO} x Gloo or {OF_FLOOR} x "
        f"floor, whichever is larger. {sum(met)} of {len(met)} cases meet it.",
    )
    table.add_column("collective", no_wrap=True)
    for column in ("ranks", "size", "sealed, µs", "Gloo, µs", "ratio", "floor", "bar", "met"):
        table.add_column(column, justify="right")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for case in cases:
        table.add_row(
            case.collective,
            str(case.ranks),
            human_bytes(case.bytes) if case.bytes else "-",
            f"{case.sealed_us:,.0f} ±{case.sealed_spread:.0%}",
            "-" if case.gloo_us is None else f"{case.gloo_us:,.0f} ±{case.gloo_spread:.0%}",
            "-" if case.ratio is None else f"[bold]{case.ratio:.3f}[/bold]",
            f"{case.floor_us:,.0f}",
            "-" if case.bar_us is None else f"{case.bar_us:,.0f}",
            marks[case.meets_bar],
        )
    return table


def _step_table(results: list[StepResult]) -> Table:
    first = results[0]
    table = Table(
        title=f"{first.model}, {first.parameters:,} parameters, {first.tokens} tokens a rank: "
        "DDP step, sealed by sealring, plaintext by Gloo (medians)"
    )
    for column in ("ranks", "sealed", "Gloo", "sealed : Gloo", "sealed a rank", "in backward"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.ranks),
            f"{result.sealed_ms:,.0f} ms ±{result.sealed_spread:.0%}",
            f"{result.gloo_ms:,.0f} ms ±{result.gloo_spread:.0%}",
            f"[bold]{result.ratio:.3f}[/bold]",
            human_bytes(result.sealed_bytes),
            f"{result.overlap:.0%}",
        )
    return table
