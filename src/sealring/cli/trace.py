"""`sealring trace`: what the ranks of a job did last, from their flight records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sealring.cli.terminal import console, human_bytes, print_json, printable
from sealring.engine.flight import CollectiveAccount
from sealring.errors import ConfigurationError
from sealring.identity.private_files import replace_private
from sealring.recorder.account import ProcessAccount
from sealring.recorder.chrome import chrome_trace
from sealring.recorder.merge import (
    clock_offsets_ns,
    collectives_numbered,
    read_flight_records,
)

app = typer.Typer(help="See what the ranks of a job did last.", no_args_is_help=True)

Paths = Annotated[
    list[Path], typer.Argument(help="Flight records (*.flight.json), or directories of them.")
]


@app.callback()
def trace() -> None:
    """See what the ranks of a job did last."""


@app.command()
def merge(
    paths: Paths,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the trace goes; replaced if there.")
    ] = Path("merged.trace.json"),
    align: Annotated[
        bool,
        typer.Option(help="Take hosts' clocks to differ, and find out how much from the ends of "
                          "collectives that all ranks leave together."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Join the flight records of several ranks into one Chrome trace (for ui.perfetto.dev)."""
    accounts = read_flight_records(paths)
    offsets = clock_offsets_ns(accounts) if align else {}
    if align and len(offsets) < len(accounts):
        alone = [str(each.rank) for index, each in enumerate(accounts) if index not in offsets]
        raise ConfigurationError(
            f"the clock of rank {', '.join(alone)} cannot be aligned: it shares no finished "
            f"all_reduce, all_gather, reduce_scatter or barrier with rank {accounts[0].rank}. "
            "Leave out --align."
        )
    replace_private(output, json.dumps(chrome_trace(accounts, offsets)).encode())
    groups = [group for each in accounts for group in each.groups]
    collectives = sum(len(group.collectives) for group in groups)
    messages = sum(len(group.messages) for group in groups)
    if as_json:
        print_json({
            "output": str(output),
            "ranks": [account.rank for account in accounts],
            "collectives": collectives,
            "messages": messages,
            "clock_ahead_s": [offsets.get(i, 0) / 1e9 for i in range(len(accounts))],
        })  # fmt: skip
        return
    console.print(
        f"{output}: {collectives} collectives and {messages} messages of rank "
        f"{', '.join(str(a.rank) for a in accounts)}. Open it in ui.perfetto.dev.",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def show(
    paths: Paths,
    number: Annotated[
        int | None, typer.Option(min=1, help="This collective on every rank, side by side.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Of groups with this name only.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Without --number: how many per rank.")] = 10,
    messages: Annotated[bool, typer.Option(help="Sends and receives, not collectives.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the last collectives of each rank, or what number N was on every one of them."""
    accounts = read_flight_records(paths)
    if messages:
        if number is not None:
            raise ConfigurationError("--number is a collective's: leave it out with --messages")
        _show_messages(accounts, group, last, as_json)
        return
    rows: list[tuple[int, str, CollectiveAccount | None]]
    if number is not None:
        found = collectives_numbered(accounts, number, group)
        rows = [(account.rank, name, each) for account, name, each in found]
    else:
        rows = [
            (account.rank, one.name, each)
            for account in accounts
            for one in account.groups
            if group is None or one.name == group
            for each in one.collectives[-last:]
        ]
    if not rows:
        _require_group(accounts, group)
    if as_json:
        print_json([
            {"rank": rank, "group": name, "collective": each and dataclasses.asdict(each)}
            for rank, name, each in rows
        ])  # fmt: skip
        return
    table = _table("rank", "group", "number", "collective", "size", "algorithm", "state", "took")
    for rank, name, each in rows:
        cells = ["", "not in the record", "", "", "", ""] if each is None else _cells(each)
        table.add_row(str(rank), *(Text(printable(cell)) for cell in (name, *cells)))
    _print(table)
    _print_errors((rank, each.error) for rank, _, each in rows if each and each.error)


def _require_group(accounts: list[ProcessAccount], group: str | None) -> None:
    """Nothing to show is an answer, but not of a group that no rank has."""
    names = sorted({one.name for account in accounts for one in account.groups})
    if group is not None and group not in names:
        there = f"there is {', '.join(map(repr, names))}" if names else "there is none"
        raise ConfigurationError(f"no rank has a group named {group!r}: {there}")


def _show_messages(
    accounts: list[ProcessAccount], group: str | None, last: int, as_json: bool
) -> None:
    rows = [
        (account.rank, one.name, each)
        for account in accounts
        for one in account.groups
        if group is None or one.name == group
        for each in one.messages[-last:]
    ]
    if not rows:
        _require_group(accounts, group)
    if as_json:
        print_json([
            {"rank": rank, "group": name, "message": dataclasses.asdict(each)}
            for rank, name, each in rows
        ])  # fmt: skip
        return
    table = _table("rank", "group", "message", "tag", "size", "state", "took")
    for rank, name, each in rows:
        whom = "anyone" if each.peer is None else str(each.peer)
        cells = [
            name,
            f"{each.operation} {'to' if each.operation == 'send' else 'from'} {whom}",
            str(each.tag),
            f"{human_bytes(each.bytes)} {each.dtype}",
            each.state,
            _time(each.ended_ns - each.posted_ns) if each.ended_ns else "",
        ]
        table.add_row(str(rank), *(Text(printable(cell)) for cell in cells))
    _print(table)
    _print_errors((rank, each.error) for rank, _, each in rows if each.error)


def _table(*columns: str) -> Table:
    """Without lines between the columns, for which 80 characters leave no room."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        # No name of a collective or of an algorithm is cut: "reduce_scatter" is the longest.
        table.add_column(column, min_width=14 if column == "collective" else len(column))
    return table


def _print(table: Table) -> None:
    """Nothing is cut: in a terminal that is too narrow, lines go on in the next."""
    least = Measurement.get(console, console.options.update(max_width=1000), table).minimum
    console.print(table, width=max(console.width, least), crop=False, soft_wrap=False)


def _print_errors(errors: Iterable[tuple[int, str]]) -> None:
    """Under the table, as wide as the terminal; what many ranks say is said once."""
    ranks: dict[str, list[int]] = {}
    for rank, error in errors:
        ranks.setdefault(error, []).append(rank)
    for error, said_by in ranks.items():
        numbers = ", ".join(map(str, sorted(set(said_by))))
        console.print(Text(printable(f"rank {numbers}: {error}")), soft_wrap=True)


def _cells(each: CollectiveAccount) -> list[str]:
    reduction = f" {each.reduction}" if each.reduction else ""
    root = f" from {each.root}" if each.root is not None else ""
    size = "" if each.bytes is None else f"{human_bytes(each.bytes)} {each.dtype}"
    took = ""
    if each.started_ns is not None and each.ended_ns is not None:
        took = _time(each.ended_ns - each.started_ns)
    return [
        "" if each.number is None else str(each.number),
        f"{each.operation}{reduction}{root}",
        size,
        each.algorithm,
        each.state,
        took,
    ]


def _time(nanoseconds: int) -> str:
    microseconds = nanoseconds / 1000
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:,.1f} ms"
