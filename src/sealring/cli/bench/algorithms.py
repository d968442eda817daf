"""`sealring bench algorithms`: which algorithm is fastest where, and the table of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench import algorithms as turns
from sealring.bench.crossover import Cell, fit
from sealring.cli.bench.options import AsJson, check_writable, parse_size, parse_world_sizes
from sealring.cli.terminal import console, human_bytes, print_json, progress_bar
from sealring.errors import ConfigurationError
from sealring.group.settings import read_settings
from sealring.schedule.table import OPERATIONS, AlgorithmTable, format_table, names

_SIZES = ",".join(f"{each >> 10}KiB" for each in turns.SIZES)


def algorithms(
    ranks: Annotated[str, typer.Option(help="Numbers of workers on this machine.")] = "2,4",
    hosts: Annotated[
        str, typer.Option(help="Hosts they pretend to be on: 1, 2, or each for one rank each.")
    ] = "1",
    sizes: Annotated[str, typer.Option(help="Bytes of one rank's message: 4096, 4KiB.")] = _SIZES,
    only: Annotated[str | None, typer.Option(help="Some of them, e.g. all_reduce,reduce.")] = None,
    blocks: Annotated[int, typer.Option(min=3, help="Timed blocks of each algorithm.")] = 15,
    table: Annotated[
        Path | None,
        typer.Option(help="Write the table here, for SEALRING_ALGORITHM_TABLE; replaced if there."),
    ] = None,
    show: Annotated[
        bool, typer.Option(help="Measure nothing: print the table in force, as Markdown.")
    ] = False,
    launched: Annotated[
        bool,
        typer.Option(help="This process is a worker of a job: measure that, not this machine."),
    ] = False,
    json: AsJson = False,
) -> None:
    """The algorithms of each operation, alternately, and the table of where they cross."""
    if show:
        in_force = read_settings(os.environ).table
        if json:
            print_json({"table": format_table(in_force, {})})
        else:
            print(as_markdown(in_force))
        return
    check_writable(table)
    chosen = [name.strip() for name in only.split(",")] if only else list(OPERATIONS)
    plan = turns.plan_of(chosen, sorted({parse_size(size) for size in sizes.split(",")}))
    if launched:
        cells = _launched_cells(plan, blocks)
        if not cells:
            return  # rank 0 alone speaks
    else:
        cells = _local_cells(plan, parse_world_sizes(ranks), hosts, blocks)
    fitted = fit(cells)
    worlds = sorted({cell.ranks for cell in cells})
    placements = list(dict.fromkeys(cell.hosts for cell in cells))
    text = format_table(fitted, turns.about_this_machine(worlds, placements, blocks))
    if table is not None:
        table.write_text(text)
    if json:
        print_json({"cases": [cell.as_json() for cell in cells], "table": text})
        return
    console.print(_algorithms_table(cells, fitted))
    if table is not None:
        console.print(f"SEALRING_ALGORITHM_TABLE={table}", markup=False, soft_wrap=True)


def _local_cells(plan: turns.Plan, worlds: list[int], hosts: str, blocks: int) -> list[Cell]:
    pairs = [(world, number) for world in worlds for number in parse_hosts(hosts, world)]
    cells: list[Cell] = []
    with progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
        task = bar.add_task("starting", total=len(pairs) * len(plan))
        for world, number in pairs:
            done = bar.tasks[0].completed
            bar.update(task, description=f"{world} ranks on {number} hosts")
            for count, found in enumerate(
                turns.measure_algorithms(
                    plan,
                    world,
                    number,
                    blocks=blocks,
                    progress=lambda part: bar.update(task, advance=part / blocks),
                ),
                start=1,
            ):
                cells += found
                bar.update(task, completed=done + count)
            bar.update(task, completed=done + len(plan))
    return cells


def _launched_cells(plan: turns.Plan, blocks: int) -> list[Cell]:
    cells: list[Cell] = []

    def report(value: object) -> None:
        if isinstance(value, list):
            cells.extend(value)

    turns.in_a_worker(plan, blocks, report)
    return cells


def parse_hosts(text: str, ranks: int) -> list[int]:
    """Numbers of hosts in "1,2,each", for a world of so many ranks."""
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


def _algorithms_table(cells: list[Cell], fitted: AlgorithmTable) -> Table:
    columns = list(dict.fromkeys(cell.algorithm for cell in cells))
    table = Table(
        title="Algorithms against each other (the slowest rank's times in the fastest block, µs)",
        caption="\n".join(
            f"{operation}, hosts {hosts}, from {ranks} ranks: {words}"
            for operation, hosts, ranks, words in _choices(fitted)
        ),
    )
    for column in ("operation", "hosts", "ranks", "size"):
        table.add_column(column, no_wrap=True, justify="left" if column < "p" else "right")
    for column in columns:
        table.add_column(column, justify="right")
    rows: dict[tuple[str, str, int, int], dict[str, Cell]] = {}
    for cell in cells:
        where = (cell.operation, cell.hosts, cell.ranks, cell.bytes)
        rows.setdefault(where, {})[cell.algorithm] = cell
    for (operation, hosts, ranks, size), by_algorithm in rows.items():
        fastest = min(cell.fastest_us for cell in by_algorithm.values())
        shown = []
        for column in columns:
            one = by_algorithm.get(column)
            text = "-" if one is None else f"{one.fastest_us:,.0f}"
            shown.append(f"[bold green]{text}[/]" if one and one.fastest_us == fastest else text)
        table.add_row(operation, hosts, str(ranks), human_bytes(size), *shown)
    return table


def as_markdown(table: AlgorithmTable) -> str:
    head = "| operation | hosts | ranks from | algorithm by one rank's bytes |"
    lines = [f"| {' | '.join(row)} |" for row in _choices(table)]
    return "\n".join([head, "|---|---|---|---|", *lines])


def _choices(table: AlgorithmTable) -> list[tuple[str, str, str, str]]:
    choices = []
    for (operation, placement), rows in table.rows.items():
        for row in rows:
            *short, last = names(row.algorithms)
            limits = zip(short, row.up_to_bytes, strict=True)
            parts = [*(f"{name} up to {human_bytes(limit)}" for name, limit in limits), last]
            words = ", then ".join(parts)
            choices.append((operation.name.lower(), placement.value, str(row.ranks), words))
    return choices
