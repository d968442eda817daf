"""`python -m sealring.lab NAME`: benchmarks for the development of sealring.

`sealring bench` has those for users. Both share options, the progress bar and tables.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli import main
from sealring.cli.bench import (
    Blocks,
    Kept,
    Sizes,
    Variants,
    Worlds,
    check_memory,
    check_ranks,
    check_writable,
    chosen_transport,
    end,
    measure,
    new_session,
    one_of,
    parse_size,
    parse_variants,
    parse_world_sizes,
    run,
    settings_of,
    several,
    show,
    show_exchanges,
    tables,
)
from sealring.cli.options import AsJson
from sealring.cli.terminal import console, errors, number_table, print_json, progress_bar
from sealring.core.group.settings import read_settings
from sealring.core.schedule.table import OPERATIONS as CHOSEN
from sealring.core.schedule.table import format_table
from sealring.core.sealed_only.setting import refuse_to_measure
from sealring.core.settings import with_settings
from sealring.errors import ConfigurationError
from sealring.lab.bench import algorithms as turns
from sealring.lab.bench import suite
from sealring.lab.bench.algorithms import Cell, fit
from sealring.lab.bench.collectives import COLLECTIVES, OPERATIONS, SIZES, Effort
from sealring.lab.bench.gpu import MODELS, WIRES, rows_of
from sealring.lab.bench.harness import BenchJob, BenchRow
from sealring.lab.bench.workers import SHARED_GPU, find_place
from sealring.lab.report.plots import bar_numbers
from sealring.lab.results import read_results

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_LINK_SIZES = ",".join(map(str, SIZES))
Folder = Annotated[
    Path | None, typer.Option(help="On which disk; the system's temporary one if not given.")
]


@app.callback()
def bench() -> None:
    """Measure parts of sealring by themselves, on this machine."""
    refuse_to_measure(os.environ)


@app.command()
def aead(blocks: Blocks = 21, results: Kept = None, json: AsJson = False) -> None:
    """The cipher and the engine's other kernels by themselves, on one core and on all."""
    cases, status = _cases(suite.aead(blocks), results)
    show({"cases": list(map(asdict, cases))}, json, [tables.kernels(cases)])
    end(status)


@app.command()
def link(
    transports: Annotated[str, typer.Option(help="shm, tcp or both.")] = "shm,tcp",
    sizes: Sizes = _LINK_SIZES,
    variants: Variants = "plain,sealed,cc",
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """What a message costs and what a byte costs, between two ranks."""
    wanted = several(sizes, parse_size)
    if len(wanted) < 3:
        raise ConfigurationError("a line needs three sizes at least, e.g. 4KiB,1MiB,25MiB")
    over = several(transports, lambda one: one_of(("shm", "tcp"), one, "a transport"))
    jobs = suite.link(over, parse_variants(variants), Effort(blocks), OPERATIONS, wanted)
    cases, status = _cases(jobs, results)
    show({"cases": list(map(asdict, cases))}, json, [tables.links(cases)])
    end(status)


def _cases(jobs: list[BenchJob], results: Path | None) -> tuple[list[Any], int | None]:
    measured, status = measure(jobs, results)
    return [case for each in measured for case in each.cases], status


@app.command()
def collectives(
    ranks: Worlds = "2,4",
    sizes: Sizes = "4KiB,25MiB",
    only: Annotated[
        str | None, typer.Option(help="Some of them, e.g. all_reduce,send_recv.")
    ] = None,
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """Every collective against torch's plaintext Gloo and against what its AES alone takes."""
    names = several(only, str) if only else list(COLLECTIVES)
    worlds, wanted = parse_world_sizes(ranks), several(sizes, parse_size)
    jobs = suite.collectives(
        "collectives", names, worlds, wanted, chosen_transport(), ("plain", "sealed"),
        Effort(blocks),
    )  # fmt: skip
    show_exchanges(jobs, results, json)


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
    from sealring.lab.bench.models import MODELS as KNOWN

    gpt2s = [name for name in KNOWN if name.startswith("gpt2")]
    parts = several(part, lambda one: one_of(suite.GPU_PARTS, one, "a part"))
    worlds = parse_world_sizes(ranks)
    models = several(model, lambda one: one_of(gpt2s, one, "a GPT-2"))
    over = several(wires, lambda one: one_of(WIRES, one, "a wire"))
    step_over = one_of(WIRES, step_wire, "a wire")
    place = replace(find_place("cuda"), gpus=1)
    if "step" in parts:
        check_memory(settings_of(models, None, ["fp32"], [25.0]), max(suite.few(worlds)), 1, place)
    session = new_session(check_writable(results))
    status = run(session, suite.gpu(parts, worlds, models, over, place, step_over, blocks))
    rows = rows_of(session.results(session.stopped))
    notes = [SHARED_GPU] if any(row.what.endswith("NCCL") for row in rows) else []
    shown = [row.as_json() for row in rows]
    table = [tables.gpu(place.name, rows, notes)] if rows else []
    show({"device": place.name, "notes": notes, "rows": shown}, json, table)
    end(status)


@app.command()
def handshake(
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 16,
    json: AsJson = False,
) -> None:
    """How long a group takes to form, and to do its first all-reduce, in turns with Gloo's."""
    from sealring.lab.bench.forming import measure_handshake

    with errors.status(f"{check_ranks(ranks)} workers start and meet"):
        rows = measure_handshake(ranks, chosen_transport())
    show_rows(f"Forming a group of {ranks}", rows, json)


def show_rows(title: str, rows: list[BenchRow], json: bool) -> None:
    numbers = number_table(title, *bar_numbers(rows))
    show({"rows": [row.as_json() for row in rows]}, json, [numbers])


@app.command()
def scale(
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, from few to many.")
    ] = "2,4,8,16,32,64,128,256",
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """What forming groups costs as ranks grow: light workers, many in a process, without torch."""
    from sealring.lab.bench.forming import growth

    numbers = sorted(several(ranks, int)) if re.fullmatch(r"\d{1,6}(,\d{1,6})*", ranks) else []
    if not numbers or numbers[0] < 2:
        raise ConfigurationError(
            f"--ranks is {ranks!r}: write numbers from 2 on with commas between them, as 2,16,64"
        )
    cases, status = _cases(suite.scale(numbers), results)
    grown = growth(cases)
    value = {"cases": list(map(asdict, cases)), "growth": grown}
    show(value, json, [tables.scale(cases, grown)])
    end(status)


@app.command()
def provenance(
    model: Annotated[str, typer.Option(help="What is trained.")] = "gpt-small",
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Workers that train.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between two statements.")] = 10,
    blocks: Annotated[int, typer.Option(min=2, help="Timed intervals of each variant.")] = 11,
    audits: Annotated[
        str, typer.Option(help="Runs that are audited: ranks x intervals, with commas between.")
    ] = "10x100,16x100",
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """Training steps with signed statements against the same without, alternately; audits of whole
    runs, and opening their pages in Chromium where there is one."""
    from sealring.lab.bench.records import measure_audit, measure_recording

    sizes = several(audits, _run_size)
    with errors.status("training") as status:
        found = measure_recording(
            model, ranks=ranks, batch=batch, every=every, blocks=blocks, folder=folder,
            progress=lambda done: status.update(f"training: {done:.0%}"),
        )  # fmt: skip
        for of_ranks, intervals in sizes:
            status.update(f"auditing a run of {of_ranks} ranks and {intervals} intervals")
            found += measure_audit(of_ranks, intervals, folder)
    show_rows(f"{model}, {ranks} ranks, and audits", found, json)


def _run_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or int(match[1]) < 2 or int(match[2]) < 1:
        raise ConfigurationError(
            f"{text!r} is no size of a run: write ranks x intervals, as 16x100, from 2x1 on"
        )
    return int(match[1]), int(match[2])


@app.command()
def log(
    entries: Annotated[int, typer.Option(min=1, help="How many the log has.")] = 100_000,
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """A transparency log: appends, proofs, a check of the whole, a witness's answers."""
    from sealring.lab.bench.records import measure_log

    show_rows("A transparency log", measure_log(entries, folder), json)


@app.command()
def algorithms(
    ranks: Worlds = "2,4",
    hosts: Annotated[
        str, typer.Option(help="Hosts they pretend to be on: 1, 2, or each for one rank each.")
    ] = "1",
    sizes: Annotated[str, typer.Option(help="Bytes of one rank's message: 4096, 4KiB.")] = ",".join(
        f"{each >> 10}KiB" for each in turns.SIZES
    ),
    only: Annotated[str | None, typer.Option(help="Some of them, e.g. all_reduce,reduce.")] = None,
    blocks: Blocks = 15,
    table: Annotated[
        Path | None,
        typer.Option(help="Write the table here, for algorithm_table; replaced if there."),
    ] = None,
    show_only: Annotated[
        bool, typer.Option("--show", help="Measure nothing: print the table in force, as Markdown.")
    ] = False,
    launched: Annotated[
        bool,
        typer.Option(
            "--launched", help="This process is a worker of a job: measure that, not this machine."
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """The algorithms of each operation, alternately, and the table of where they cross."""
    if show_only:
        in_force = read_settings(os.environ).table
        if json:
            print_json({"table": format_table(in_force, {})})
        else:
            print(tables.as_markdown(in_force))
        return
    check_writable(table)
    plan = turns.plan_of(several(only, str) if only else list(CHOSEN), several(sizes, parse_size))
    if launched:
        cells = _launched_cells(plan, blocks)
        if not cells:
            return  # only rank 0 prints
    else:
        cells = _local_cells(plan, parse_world_sizes(ranks), hosts, blocks)
    fitted = fit(cells)
    worlds = sorted({cell.ranks for cell in cells})
    placements = list(dict.fromkeys(cell.hosts for cell in cells))
    text = format_table(fitted, turns.about_this_machine(worlds, placements, blocks))
    if table is not None:
        table.write_text(text)
    found = {"cases": [asdict(cell) for cell in cells], "table": text}
    show(found, json, [tables.algorithms(cells, fitted)])
    if table is not None and not json:
        chosen = with_settings({}, algorithm_table=str(table))
        for name, value in chosen.items():
            console.print(f"{name}='{value}'", markup=False, soft_wrap=True)


def _local_cells(plan: turns.Plan, worlds: list[int], hosts: str, blocks: int) -> list[Cell]:
    pairs = [(world, number) for world in worlds for number in parse_hosts(hosts, world)]
    cells: list[Cell] = []
    with progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
        task = bar.add_task("starting", total=len(pairs))
        for done, (world, number) in enumerate(pairs):
            bar.update(task, completed=done, description=f"{world} ranks on {number} hosts")
            for found in turns.measure_algorithms(plan, world, number, blocks=blocks):
                cells += found
                bar.update(task, advance=1 / len(plan))
    return cells


def _launched_cells(plan: turns.Plan, blocks: int) -> list[Cell]:
    cells: list[Cell] = []

    def report(value: object) -> None:
        if isinstance(value, list):
            cells.extend(value)

    turns.in_a_worker(plan, blocks, report)
    return cells


def parse_hosts(text: str, ranks: int) -> list[int]:
    """Parses numbers of hosts: "1,2,each" for a world of `ranks` ranks."""
    hosts = []
    for word in text.split(","):
        number = ranks if word == "each" else int(word) if word.isdecimal() else 0
        if not 1 <= number <= ranks or ranks % number:
            raise ConfigurationError(
                f"--hosts is {text!r}: {ranks} ranks can be on 1 host, on a number of hosts that "
                "divides them, or on one each"
            )
        hosts.append(number)
    return list(dict.fromkeys(hosts))


@app.command()
def validate(
    results: Annotated[Path, typer.Argument(help="A results.json of `sealring bench all`.")],
    json: AsJson = False,
) -> None:
    """What `sealring plan` would have predicted for a bench run, against what was measured."""
    from sealring.cli.plan import show_validation
    from sealring.lab.plan.validate import validate as compared

    show_validation(compared(read_results(results)), json)


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(help="A published experiment: 2501.11771.")],
    json: AsJson = False,
) -> None:
    """What the profile of published figures predicts for an experiment that others published."""
    from sealring.lab.plan.validate import reproduce as predicted

    title = f"arXiv {experiment}: GPT-2-XL on four GPUs, profile h100-cc, nothing fitted"
    show_rows(title, predicted(experiment), json)


if __name__ == "__main__":
    main(app)
