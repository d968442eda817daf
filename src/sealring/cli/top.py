"""`sealring top`: what the workers of this machine do, while they do it."""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sealring.cli.terminal import console, human_bytes, keys, print_json, printable
from sealring.errors import ConfigurationError
from sealring.live.directory import SETTING, chosen_directory
from sealring.live.reader import Reading, read_all
from sealring.live.status import GroupStatus, PeerStatus, WorkerStatus

Rates = dict[tuple[str, int], tuple[float, float]]
"""Bytes sealed and opened in a second, by host and process."""


def top(
    job: Annotated[str | None, typer.Option(help="Workers of this job only.")] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two readings.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: print JSON instead of tables.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(help=f"Where the workers' sockets are. Default: as {SETTING} says."),
    ] = None,
) -> None:
    """Show the workers that run on this machine: what they seal, and whom they wait for."""
    if as_json and not once:
        raise ConfigurationError("--json prints one reading: pass --once besides")
    if not once and not console.is_terminal:
        raise ConfigurationError(
            "the view is drawn over and over, and stdout is no terminal: pass --once"
        )
    place = directory or chosen_directory(os.environ)
    if place is None:
        raise ConfigurationError(
            f"{SETTING}=0 switches the live view off: unset it, or --directory"
        )
    before = _read(place, job)
    time.sleep(interval)
    reading = _read(place, job)
    rates = rates_between(before, reading)
    if as_json:
        print_json(as_document(reading, rates))
    elif once:
        console.print(screen(reading, rates, place))
    else:
        _watch(place, job, interval, reading, rates)


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
    hosts: dict[int, str] = {
        peer.rank: peer.host
        for each in workers
        for group in each.groups
        for peer in group.peers
        if peer.rank not in here
    }
    if hosts:
        text += f"; others on {', '.join(sorted(map(printable, set(hosts.values()))))}"
    return text


def _workers(workers: list[WorkerStatus], rates: Rates) -> Table:
    table = _table("rank", "pid", "sealed/s", "opened/s", "sealed", "groups", "certificate")
    for each in workers:
        sealed, opened = rates.get((each.host, each.pid), (None, None))
        table.add_row(
            str(each.rank),
            str(each.pid),
            _rate(sealed),
            _rate(opened),
            human_bytes(each.sealed_bytes),
            _open_groups(each),
            _certificate(each),
        )
    return table


def _groups(workers: list[WorkerStatus]) -> Table:
    table = _table("rank", "group", "state", "size", "age", "GPU wire", "waited longest for")
    for each in workers:
        for group in each.groups:
            if group.state != "closed":
                table.add_row(
                    str(each.rank),
                    Text(printable(group.name)),
                    Text(group.state, style="red" if group.state == "failed" else ""),
                    str(group.size),
                    _duration(group.age_s),
                    printable(group.gpu_wire or "none"),
                    Text(_waited(group)),
                )
    return table


def _errors(workers: list[WorkerStatus]) -> list[Text]:
    return [
        Text(printable(f"rank {each.rank}, {_duration(last.age_s)} ago: {last.text}"), style="red")
        for each in workers
        if (last := each.last_error) is not None
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    for name in columns:
        words = name in ("group", "state", "GPU wire", "waited longest for", "certificate")
        table.add_column(name, justify="left" if words else "right", overflow="ellipsis",
                         no_wrap=name != "waited longest for")  # fmt: skip
    return table


def _open_groups(worker: WorkerStatus) -> str:
    shown = sum(group.state != "closed" for group in worker.groups)
    left_out = worker.groups_open - shown
    return f"{worker.groups_open}" if left_out <= 0 else f"{worker.groups_open} ({shown} below)"


def _waited(group: GroupStatus) -> str:
    longest: PeerStatus | None = next(iter(group.peers), None)
    if longest is None or longest.waited_s < 0.001:
        return ""
    return f"rank {longest.rank}: {_duration(longest.waited_s)} ({longest.transport})"


def _certificate(worker: WorkerStatus) -> str:
    left = worker.certificate_ends_s - worker.time_s
    return "has ended" if left <= 0 else f"{_duration(left)} left"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{human_bytes(value)}/s"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
