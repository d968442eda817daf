"""python -m tests.chaos --seconds 120 --seed 7"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from sealring.cli.terminal import console, errors, print_json, progress_bar
from tests.chaos.plan import Where
from tests.chaos.run import Chaos, Counts


def main(
    seconds: Annotated[
        float, typer.Option(help="how long, a third for each kind of world")
    ] = 120.0,
    seed: Annotated[int | None, typer.Option(help="of traffic and faults; random if unset")] = None,
    world: Annotated[
        str, typer.Option(help="one world only, as local/17, light/5 or processes/3")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(help="kinds of worlds; all if unset")] = None,
    out: Annotated[Path, typer.Option(help="where pages of violations go")] = Path("build/chaos"),
    json: Annotated[bool, typer.Option("--json", help="counts as JSON")] = False,
) -> None:
    """Traffic with random faults; every result and every error is checked."""
    kinds = only or list(get_args(Where))
    if not set(kinds) <= set(get_args(Where)):
        raise typer.BadParameter("--only is local, light or processes")
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    if not json:
        console.print(f"chaos with seed {chosen}")
    with progress_bar("{task.fields[counts]}") as bar:
        task = bar.add_task("chaos", total=seconds, counts="")

        def on_world(counts: Counts) -> None:
            worlds = counts.worlds.total()
            text = (
                f"{worlds} worlds, {counts.faults.total()} faults, {counts.violations} violations"
            )
            bar.update(task, completed=bar.tasks[0].elapsed, counts=text)

        chaos = Chaos(chosen, out, on_world)
        if world:
            where, _, number = world.partition("/")
            if where not in get_args(Where) or not number.isdecimal():
                raise typer.BadParameter("--world is local/N, light/N or processes/N")
            chaos.one(cast(Where, where), int(number))
        else:
            for kind in kinds:
                share = seconds / len(kinds)
                {"local": chaos.local, "light": chaos.light, "processes": chaos.processes}[kind](
                    share
                )
    counts = chaos.counts
    if json:
        print_json(vars(counts))
    else:
        show(counts)
    for path, again in zip(counts.pages, counts.commands, strict=True):
        errors.print(f"[red]violation[/red]: {path} ({again})", soft_wrap=True)
    sys.exit(1 if counts.violations else 0)


def show(counts: Counts) -> None:
    table = Table(box=None, show_header=False)
    rows: dict[str, Any] = {
        "worlds": _listed(counts.worlds),
        "calls": f"{_listed(counts.calls)}; {counts.results} ranks' results compared",
        "faults that struck": _listed(counts.faults),
        "groups ended with": _listed(counts.outcomes),
        "ranks' errors": _listed(counts.errors),
        "a stopped rank's peers": _listed(counts.silences),
        "slowest to know": f"{counts.slowest_s:.1f} s after the fault, its timeout included",
        "inconclusive": f"{counts.inconclusive} worlds in which the machine stood still",
        "violations": f"{counts.violations}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _listed(counter: Counter[str]) -> str:
    each = ", ".join(f"{name} {count}" for name, count in counter.most_common())
    return f"{counter.total()}: {each}" if counter else "0"


if __name__ == "__main__":
    typer.run(main)
