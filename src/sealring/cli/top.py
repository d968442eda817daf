"""`sealring top`: what the workers of this machine do, their counts, and what they did last."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sealring.cli.options import AsJson
from sealring.cli.terminal import (
    console,
    human_bytes,
    keys,
    print_json,
    printable,
    say,
    table,
    warn,
)
from sealring.core.settings import LIVE
from sealring.errors import ConfigurationError
from sealring.formats.files import replace_private
from sealring.observe import CollectiveAccount, MessageAccount, ProcessAccount
from sealring.observe.directory import chosen_directory
from sealring.observe.exporter import Exporter, as_text, parse_address, server_tls
from sealring.observe.server import CachedAnswer
from sealring.observe.status import GroupStatus, Reading, WorkerStatus, read_all
from sealring.observe.trace import chrome_trace, clock_offsets_ns, read_flight_records

app = typer.Typer(
    add_completion=False, help="See what the workers of this machine do, and what they did last."
)

Rates = dict[tuple[str, int], tuple[float, float]]
"""Bytes sealed and opened per second, by host and process."""
Pem = Annotated[Path | None, typer.Option(help="PEM. All three of them: TLS with client proof.")]


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    job: Annotated[str | None, typer.Option(help="Workers of this job only.")] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two readings.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show the workers that run on this machine: what they seal, and whom they wait for.

    Where standard output is no terminal, and with --json, it prints one reading and stops.
    """
    if context.invoked_subcommand is not None:
        return
    place = _directory()
    before = _read(place, job)
    time.sleep(interval)
    reading = _read(place, job)
    rates = rates_between(before, reading)
    if as_json:
        print_json(as_document(reading, rates))
    elif not console.is_terminal:
        console.print(screen(reading, rates, place))
    else:
        _watch(place, job, interval, reading, rates)


def _directory() -> Path:
    place = chosen_directory(os.environ)
    if place is None:
        raise ConfigurationError(f"{LIVE.name}=0 switches the live view off: unset it")
    return place


def _watch(
    place: Path, job: str | None, interval: float, reading: Reading[WorkerStatus], rates: Rates
) -> None:
    first = _drawn(reading, rates, place)
    with (
        suppress(KeyboardInterrupt),
        keys() as pressed,
        Live(first, console=console, screen=True) as live,
    ):
        while not pressed("q", interval):
            before, reading = reading, _read(place, job)
            rates = rates_between(before, reading)
            live.update(_drawn(reading, rates, place), refresh=True)


def _drawn(reading: Reading[WorkerStatus], rates: Rates, place: Path) -> RenderableType:
    return Group(screen(reading, rates, place), Text("q ends this view.", style="dim"))


def _read(place: Path, job: str | None) -> Reading[WorkerStatus]:
    reading = read_all(WorkerStatus, place)
    chosen = [each for each in reading.answers if job is None or each.job == job]
    reading.answers = sorted(chosen, key=lambda each: (each.job, each.rank, each.pid))
    return reading


def rates_between(before: Reading[WorkerStatus], after: Reading[WorkerStatus]) -> Rates:
    earlier = {(each.host, each.pid): each for each in before.answers}
    rates: Rates = {}
    for now in after.answers:
        then = earlier.get((now.host, now.pid))
        if then is None or now.monotonic_ns <= then.monotonic_ns:
            continue
        seconds = (now.monotonic_ns - then.monotonic_ns) / 1e9
        rates[now.host, now.pid] = (
            max(0, now.sealed_bytes - then.sealed_bytes) / seconds,
            max(0, now.opened_bytes - then.opened_bytes) / seconds,
        )
    return rates


def as_document(reading: Reading[WorkerStatus], rates: Rates) -> dict[str, Any]:
    workers = []
    for each in reading.answers:
        sealed, opened = rates.get((each.host, each.pid), (None, None))
        workers.append(
            {
                **dataclasses.asdict(each),
                "sealed_bytes": each.sealed_bytes,
                "opened_bytes": each.opened_bytes,
                "sealed_bytes_per_s": sealed,
                "opened_bytes_per_s": opened,
            }
        )
    return {"workers": workers, "stale": reading.stale, "silent": reading.silent}


def screen(reading: Reading[WorkerStatus], rates: Rates, place: Path) -> RenderableType:
    parts: list[RenderableType] = []
    jobs: dict[str, list[WorkerStatus]] = {}
    for each in reading.answers:
        jobs.setdefault(each.job, []).append(each)
    for name, workers in jobs.items():
        parts += [Text(_headline(name, workers), style="bold"), _workers(workers, rates)]
        parts += [_groups(workers), *_errors(workers), Text()]
    if not jobs:
        parts.append(Text(f"No worker answers in {place}."))
    if reading.stale:
        parts.append(Text(f"{len(reading.stale)} sockets of workers that were killed."))
    for socket, why in reading.silent.items():
        parts.append(Text(printable(f"{socket}: no answer: {why}"), style="yellow"))
    return Group(*parts)


def _headline(job: str, workers: list[WorkerStatus]) -> str:
    here = {each.rank for each in workers}
    size = max(each.size for each in workers)
    text = f"job {printable(job)}: {len(here)} of {size} ranks are on this machine"
    hosts = {
        peer.host
        for each in workers
        for group in each.groups
        for peer in group.peers
        if peer.rank not in here
    }
    return text + (f"; others on {', '.join(sorted(map(printable, hosts)))}" if hosts else "")


def _workers(workers: list[WorkerStatus], rates: Rates) -> Table:
    rows = []
    for each in workers:
        sealed, opened = map(_rate, rates.get((each.host, each.pid), (None, None)))
        left = each.certificate_ends_s - each.time_s
        rows.append([
            str(each.rank), str(each.pid), sealed, opened, human_bytes(each.sealed_bytes),
            _open_groups(each), "has ended" if left <= 0 else f"{_duration(left)} left",
        ])  # fmt: skip
    columns = ("rank", "pid", "sealed/s", "opened/s", "sealed", "groups", "certificate")
    return table(columns, rows, right=columns[:-1])


def _groups(workers: list[WorkerStatus]) -> Table:
    rows = [
        (
            str(each.rank), group.name, Text(group.state, "red" if group.state == "failed" else ""),
            str(group.size), _duration(group.age_s), group.gpu_wire or "none", _waited(group),
        )
        for each in workers
        for group in each.groups
        if group.state != "closed"
    ]  # fmt: skip
    columns = ("rank", "group", "state", "size", "age", "GPU wire", "waited longest for")
    return table(columns, rows, right=("rank", "size", "age"), wrap=columns[-1:])


def _errors(workers: list[WorkerStatus]) -> list[Text]:
    return [
        Text(printable(f"rank {each.rank}, {_duration(last.age_s)} ago: {last.text}"), style="red")
        for each in workers
        if (last := each.last_error) is not None
    ]


def _open_groups(worker: WorkerStatus) -> str:
    shown = sum(group.state != "closed" for group in worker.groups)
    left_out = worker.groups_open - shown
    return f"{worker.groups_open}" if left_out <= 0 else f"{worker.groups_open} ({shown} below)"


def _waited(group: GroupStatus) -> str:
    longest = next(iter(group.peers), None)
    if longest is None or longest.waited_s < 0.001:
        return ""
    return f"rank {longest.rank}: {_duration(longest.waited_s)} ({longest.transport})"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{human_bytes(value)}/s"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


@app.command()
def metrics(
    listen: Annotated[
        str | None,
        typer.Option(help="IP:PORT to serve /metrics on, as 127.0.0.1:9464. Default: print once."),
    ] = None,
    certificate: Pem = None,
    key: Pem = None,
    authority: Pem = None,
) -> None:
    """Give what the workers of this machine count to Prometheus or OpenTelemetry's collector."""
    place = _directory()

    def text() -> str:
        reading = read_all(WorkerStatus, place)
        return as_text(reading.answers, len(reading.silent))

    given = [each for each in (certificate, key, authority) if each is not None]
    if given and (len(given) < 3 or listen is None):
        raise ConfigurationError(
            "--certificate, --key and --authority go together, with --listen: TLS, with clients "
            "that show a certificate of that authority"
        )
    if listen is None:
        print(text(), end="")
        return
    tls = server_tls(given[0], given[1], given[2]) if given else None
    with Exporter(parse_address(listen), CachedAnswer(lambda: text().encode()), tls) as exporter:
        host, port = exporter.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        warn(f"{'http' if tls is None else 'https'}://{shown}:{port}/metrics")
        with suppress(KeyboardInterrupt):
            exporter.serve_forever()


_LAST: Final = 10
"""How many entries are shown for each rank and group. A Chrome trace has all."""
Account = CollectiveAccount | MessageAccount
Row = tuple[int, str, Account | None]
"""A rank, its group, and a collective or message; None if the record has no such number."""
COLLECTIVES: Final = ("rank", "group", "number", "collective", "size", "algorithm", "state", "took")
MESSAGES: Final = ("rank", "group", "message", "tag", "size", "state", "took")


@app.command()
def trace(
    paths: Annotated[
        list[Path], typer.Argument(help="Flight records (*.flight.json), or directories of them.")
    ],
    number: Annotated[
        int | None, typer.Option(min=1, help="This collective on every rank, side by side.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Groups with this name only.")] = None,
    messages: Annotated[bool, typer.Option(help="Sends and receives, not collectives.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Instead: write one Chrome trace of all ranks to this file."
        ),
    ] = None,
    align: Annotated[
        bool,
        typer.Option(
            "--align",
            help="With --output: take hosts' clocks to differ, and find out how much from the ends "
            "of collectives that all ranks leave together.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last collectives of each rank, or what number N was on every one of them."""
    accounts = read_flight_records(paths)
    if output is not None:
        _write_trace(accounts, output, align, as_json)
        return
    if align:
        raise ConfigurationError("--align is for --output FILE, which is not given")
    if messages and number is not None:
        raise ConfigurationError("--number is a collective's: leave it out with --messages")
    rows = _rows(accounts, number, group, messages)
    if not rows:
        _require_group(accounts, group)
    if as_json:
        kind = "message" if messages else "collective"
        print_json([
            {"rank": rank, "group": name, kind: each and dataclasses.asdict(each)}
            for rank, name, each in rows
        ])  # fmt: skip
        return
    columns = MESSAGES if messages else COLLECTIVES
    shown = table(columns, [(str(rank), name, *_cells(each)) for rank, name, each in rows],
                  wrap=columns)  # fmt: skip
    if not messages:
        # Wide enough for the longest name, "reduce_scatter".
        shown.columns[columns.index("collective")].min_width = 14
    # Nothing is cut: in a terminal that is too narrow, lines continue in the next line.
    least = Measurement.get(console, console.options.update(max_width=1000), shown).minimum
    console.print(shown, width=max(console.width, least), crop=False, soft_wrap=False)
    _print_errors(rows)


def _write_trace(
    accounts: Sequence[ProcessAccount], output: Path, align: bool, as_json: bool
) -> None:
    offsets = clock_offsets_ns(accounts) if align else {}
    if align and len(offsets) < len(accounts):
        alone = [str(each.rank) for index, each in enumerate(accounts) if index not in offsets]
        raise ConfigurationError(
            f"the clock of rank {', '.join(alone)} cannot be aligned: it shares no finished "
            f"all_reduce, all_gather, reduce_scatter or barrier with rank {accounts[0].rank}. "
            "Leave out --align."
        )
    replace_private(output, json.dumps(chrome_trace(accounts, offsets)).encode())
    ranks = [account.rank for account in accounts]
    if as_json:
        ahead = [offsets.get(index, 0) / 1e9 for index in range(len(accounts))]
        print_json({"output": str(output), "ranks": ranks, "clock_ahead_s": ahead})
    else:
        say(f"{output}: rank {', '.join(map(str, ranks))}. Open it in ui.perfetto.dev.")


def _rows(
    accounts: Sequence[ProcessAccount],
    number: int | None,
    group: str | None,
    messages: bool,
) -> list[Row]:
    rows: list[Row] = []
    for account in accounts:
        for one in account.groups:
            if group is not None and one.name != group:
                continue
            did: Sequence[Account | None]
            if number is not None:
                did = [one.collective(number)]
            else:
                did = (one.messages if messages else one.collectives)[-_LAST:]
            rows += [(account.rank, one.name, each) for each in did]
    return rows


def _require_group(accounts: Sequence[ProcessAccount], group: str | None) -> None:
    """Raises ConfigurationError if no rank has a group of this name."""
    names = sorted({one.name for account in accounts for one in account.groups})
    if group is not None and group not in names:
        there = f"there is {', '.join(map(repr, names))}" if names else "there is none"
        raise ConfigurationError(f"no rank has a group named {group!r}: {there}")


def _cells(each: Account | None) -> list[str]:
    if each is None:
        return ["", "not in the record", "", "", "", ""]
    size = "" if each.bytes is None else f"{human_bytes(each.bytes)} {each.dtype}"
    if isinstance(each, MessageAccount):
        whom = "anyone" if each.peer is None else str(each.peer)
        way = "to" if each.operation == "send" else "from"
        first = [f"{each.operation} {way} {whom}", str(each.tag), size]
        began: int | None = each.posted_ns
    else:
        reduction = f" {each.reduction}" if each.reduction else ""
        root = f" from {each.root}" if each.root is not None else ""
        number = "" if each.number is None else str(each.number)
        first = [number, f"{each.operation}{reduction}{root}", size, each.algorithm]
        began = each.started_ns
    took = "" if began is None or each.ended_ns is None else _time(each.ended_ns - began)
    return [*first, each.state, took]


def _print_errors(rows: Iterable[Row]) -> None:
    """Prints the errors under the table; an error that several ranks have is printed once."""
    ranks: dict[str, set[int]] = {}
    for rank, _, each in rows:
        if each is not None and each.error:
            ranks.setdefault(each.error, set()).add(rank)
    for error, said_by in ranks.items():
        say(printable(f"rank {', '.join(map(str, sorted(said_by)))}: {error}"))


def _time(nanoseconds: int) -> str:
    microseconds = nanoseconds / 1000
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:,.1f} ms"
