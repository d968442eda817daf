"""`sealring bench`: what protection costs on this machine.

algorithms the algorithms against each other, and the table of them
forming    groups, and workers that join
log        a transparency log: appends and proofs
options    what may be written, and what is refused
provenance signed statements of a run, and audits
running    the bar, and what becomes of a run that is stopped
tables     what people read
vault      checkpoints
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.bench import allreduce as allreduces
from sealring.bench import step as training
from sealring.bench import suite
from sealring.bench.cc import COPY_US
from sealring.bench.cc import Path as CcPath
from sealring.bench.collectives import COLLECTIVES, judged
from sealring.bench.exchange import Effort
from sealring.bench.floor import aes_rate
from sealring.bench.gpu.bars import rows_of
from sealring.bench.gpu.groups import WIRES
from sealring.bench.gpu.steps import MODELS
from sealring.bench.link import OPERATIONS, SIZES
from sealring.bench.place import SHARED_GPU, find_place
from sealring.bench.session import Job
from sealring.cli.bench import tables
from sealring.cli.bench.algorithms import algorithms
from sealring.cli.bench.forming import attest, handshake, scale
from sealring.cli.bench.log import log
from sealring.cli.bench.options import (
    AsJson,
    Transport,
    check_gpt2,
    check_memory,
    check_own_wire,
    check_part,
    check_ranks,
    check_threads,
    check_transport,
    check_variants,
    check_wire,
    check_writable,
    parse_batch,
    parse_bucket,
    parse_precision,
    parse_size,
    parse_variants,
    parse_world_sizes,
    settings_of,
    several,
)
from sealring.cli.bench.provenance import provenance
from sealring.cli.bench.running import end, new_session, run
from sealring.cli.bench.vault import vault
from sealring.cli.terminal import console, print_json
from sealring.errors import ConfigurationError
from sealring.formats.files import writing
from sealring.report.drawing import plotting_library
from sealring.report.page import write_page
from sealring.sealed_only.setting import refuse_to_measure

app = typer.Typer(help="Measure what protection costs on this machine.", no_args_is_help=True)
app.command()(algorithms)
app.command()(attest)
app.command()(handshake)
app.command()(log)
app.command()(provenance)
app.command()(scale)
app.command()(vault)

Blocks = Annotated[int, typer.Option(min=3, help="Timed blocks of each variant.")]
Variants = Annotated[str, typer.Option(help="Of plain (Gloo), sealed, cc (GPU-TEE, emulated).")]
Worlds = Annotated[str, typer.Option(help="Numbers of workers on this machine.")]
Kept = Annotated[Path | None, typer.Option("--results", help="Write every sample to this file.")]


@app.callback()
def bench() -> None:
    """Measure what protection costs on this machine."""
    refuse_to_measure(os.environ)


def _measure(jobs: list[Job], results: Path | None) -> tuple[list[Any], int | None]:
    session = new_session(check_writable(results))
    status = run(session, jobs)
    return session.measured, status


@app.command()
def aead(blocks: Blocks = 21, results: Kept = None, json: AsJson = False) -> None:
    """The cipher and the engine's other kernels by themselves, on one core and on all."""
    runs, status = _measure(suite.aead(blocks), results)
    if json:
        print_json({"cases": [_plain(case) for run in runs for case in run.cases(0)]})
    elif runs:
        console.print(tables.kernels(runs))
    end(status)


@app.command()
def link(
    transports: Annotated[str, typer.Option(help="shm, tcp or both.")] = "shm,tcp",
    sizes: Annotated[str, typer.Option(help="Sizes of the tensors; three or more.")] = ",".join(
        map(str, SIZES)
    ),
    variants: Variants = "plain,sealed,cc",
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """What a message costs and what a byte costs, between two ranks."""
    wanted = several(sizes, parse_size)
    if len(wanted) < 3:
        raise ConfigurationError("a line needs three sizes at least, e.g. 4KiB,1MiB,25MiB")
    over = several(transports, check_transport)
    effort = Effort(blocks)
    hops, status = _measure(
        suite.link(over, parse_variants(variants), effort, OPERATIONS, wanted), results
    )
    if json:
        print_json({"cases": [_plain(case) for hop in hops for case in hop.cases(0)]})
    elif hops:
        console.print(tables.links(hops))
    end(status)


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 2,
    size: Annotated[str, typer.Option(help="Tensor sizes: 4096, 4KiB, 25MiB.")] = "25MiB",
    transport: Transport = "shm",
    world_sizes: Annotated[
        str | None, typer.Option(help="Several numbers of ranks, e.g. 2,3,4,8.")
    ] = None,
    variants: Variants = "plain,sealed",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads a rank for large tensors; by default its cores."),
    ] = None,
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """Sealed all-reduce against torch's plaintext Gloo, alternately in one run (medians)."""
    check_transport(transport)
    worlds = parse_world_sizes(world_sizes) if world_sizes else [check_ranks(ranks)]
    sizes = several(size, parse_size)
    wanted = ("plain", *(each for each in parse_variants(variants) if each in ("sealed", "cc")))
    cases, status = _measure(
        suite.allreduce(worlds, sizes, transport, wanted, Effort(blocks), check_threads(threads)),
        results,
    )
    if json:
        rows = [allreduces.row(case) for case in cases]
        single = len(rows) == 1 and not world_sizes
        print_json(rows[0] if single else {"cases": rows})
    elif cases:
        console.print(tables.allreduce(cases))
    end(status)


@app.command()
def collectives(
    ranks: Worlds = "2,4",
    sizes: Annotated[str, typer.Option(help="Tensor sizes: 4096, 4KiB, 25MiB.")] = "4KiB,25MiB",
    transport: Transport = "shm",
    only: Annotated[
        str | None, typer.Option(help="Some of them, e.g. all_reduce,send_recv.")
    ] = None,
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """Every collective against torch's plaintext Gloo and against what its AES alone takes."""
    check_transport(transport)
    names = several(only, str) if only else list(COLLECTIVES)
    jobs = suite.collectives(
        names, parse_world_sizes(ranks), several(sizes, parse_size), transport, Effort(blocks)
    )
    rate = aes_rate()
    measured, status = _measure(jobs, results)
    cases = [judged(exchange, rate) for exchange in measured]
    if json:
        print_json({"cases": [case.as_json() for case in cases]})
    elif cases:
        console.print(tables.collectives(cases))
    end(status)


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Names, e.g. gpt-small,mlp,gpt2.")] = "gpt-small",
    ranks: Worlds = "2,4",
    bucket_cap_mb: Annotated[str, typer.Option(help="DDP's buckets, in MB: 1,25,100.")] = "25",
    batch: Annotated[
        str | None, typer.Option(help="Samples a rank; each model has a default.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of weights and gradients: fp32, bf16.")] = "fp32",
    variants: Annotated[
        str, typer.Option(help="Of compute (no DDP), plain (torch's own), sealed, cc (emulated).")
    ] = "plain,sealed",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: GPUs where there are any, in turn.")
    ] = "cpu",
    transport: Transport = "shm",
    wire: Annotated[
        str, typer.Option(help="Of sealed tensors on GPUs: auto, host, peer or nccl.")
    ] = "auto",
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each variant.")] = 11,
    cc_copy_us: Annotated[
        float, typer.Option(min=0, max=1e6, help="What a copy costs the emulated path, in µs.")
    ] = COPY_US,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of one sealed step on rank 0; for one --ranks."),
    ] = None,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """A DDP training step, sealed against torch's own backend, alternately (medians)."""
    worlds = parse_world_sizes(ranks)
    settings = settings_of(
        several(model, str),
        several(batch, parse_batch) if batch else None,
        several(precision, parse_precision),
        several(bucket_cap_mb, parse_bucket),
    )
    wanted = parse_variants(variants)
    if trace is not None and len(worlds) > 1:
        raise ConfigurationError(f"one trace shows one world: pass --ranks {worlds[0]}")
    check_transport(transport)
    check_writable(trace)
    place = find_place(device)
    check_variants(wanted, place)
    for world in worlds:
        check_memory(settings, world, len(wanted), place)
    jobs = suite.steps(
        training.Work(
            world, settings, wanted, steps, transport, CcPath(cc_copy_us), trace, place,
            check_wire(wire),
        )
        for world in worlds
    )  # fmt: skip
    measured, status = _measure(jobs, results)
    cases = [case for case in measured if case.ranks > 1]
    shared = [SHARED_GPU] if any(place.shared_by(case.ranks) for case in cases) else []
    if json:
        rows = [training.row(case) for case in cases]
        print_json({"device": place.name, "notes": shared, "cases": rows})
    elif cases:
        console.print(tables.steps(cases, shared))
        console.print(tables.splits(cases))
    end(status)


@app.command()
def gpu(
    part: Annotated[str, typer.Option(help="Some of its parts.")] = ",".join(suite.GPU_PARTS),
    ranks: Annotated[str, typer.Option(help="Numbers of workers, all on one GPU.")] = "2,4,8,16",
    model: Annotated[str, typer.Option(help="GPT-2s to train, by the most workers.")] = ",".join(
        MODELS
    ),
    wires: Annotated[str, typer.Option(help="Over which all-reduces go.")] = ",".join(WIRES),
    step_wire: Annotated[str, typer.Option(help="Over which gradients go.")] = "host",
    blocks: Blocks = 11,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """Sealing by the GPU that holds the tensor: its kernels, collectives and training steps."""
    parts = several(part, check_part)
    worlds, models = parse_world_sizes(ranks), several(model, check_gpt2)
    over, step_over = several(wires, check_own_wire), check_own_wire(step_wire)
    place = replace(find_place("cuda"), gpus=1)
    if "step" in parts:
        check_memory(settings_of(models, None, ["fp32"], [25.0]), max(suite.few(worlds)), 1, place)
    session = new_session(check_writable(results))
    status = run(session, suite.gpu(parts, worlds, models, over, place, step_over, blocks))
    rows = rows_of(session.results(session.stopped))
    notes = [SHARED_GPU] if any(row.what.endswith("NCCL") for row in rows) else []
    if json:
        shown = [row.as_json() for row in rows]
        print_json({"device": place.name, "notes": notes, "rows": shown})
    elif rows:
        console.print(tables.gpu(place.name, rows, notes))
    end(status)


@app.command("all")
def everything(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and samples: minutes instead of an hour.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Some of its parts: aead,link,allreduce,collectives,step,scale,gpu."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The directory for both files; made if missing.")
    ] = Path(),
    report: Annotated[bool, typer.Option(help="Make the page as well.")] = True,
) -> None:
    """All of it, into results.json with every sample and report.html, which explains them."""
    parts = suite.everything(quick=quick)
    wanted = several(only, str) if only else list(parts)
    if unknown := [name for name in wanted if name not in parts]:
        raise ConfigurationError(f"{unknown[0]!r} is not a part; there is {', '.join(parts)}")
    if report:
        plotting_library()  # said now, not after the measurement
    with writing(output, "made"):
        output.mkdir(parents=True, exist_ok=True)
    session = new_session(output / "results.json")
    status = run(session, [job for name in wanted for job in parts[name]])
    if (table := tables.summary(session.measured)).row_count:
        console.print(table)
    found = session.results(session.stopped)
    if rows := rows_of(found):
        console.print(tables.gpu(", ".join(dict.fromkeys(found.machine.gpus)), rows))
    files = f"{output / 'results.json'}"
    if report and session.measured:
        write_page(output / "report.html", found)
        files += f" and {output / 'report.html'}"
    console.print(f"{files}: written.", markup=False, soft_wrap=True)
    end(status)


def _plain(case: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(case)
