"""`sealring doctor --watch PID`: the sockets and groups of a running job, and which are sealed."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from sealring.cli.terminal import console, print_json, printable
from sealring.live.watch import ALARMS, WatchedProcess, WatchedSocket
from sealring.live.watch import watch as look

_STYLES = {"sealed": "green", "not sealed": "bold red", "unknown": "yellow"}


def watch(pid: int, *, as_json: bool, directory: Path | None) -> None:
    """Exit status 1 if something is not sealed, or cannot be told."""
    processes = look(pid, os.environ, directory)
    clean = not any(_alarms(each) for each in processes)
    if as_json:
        print_json({"sealed": clean, "processes": [asdict(each) for each in processes]})
    else:
        for each in processes:
            _print(each)
        _print_end(processes)
    if not clean:
        raise typer.Exit(1)


def _alarms(process: WatchedProcess) -> bool:
    hidden = process.listed_by is None
    plaintext = any(not group.sealed for group in process.groups)
    return hidden or plaintext or any(each.verdict in ALARMS for each in process.sockets)


def _print(process: WatchedProcess) -> None:
    shown = [each for each in process.sockets if each.verdict != "local"]
    local = len(process.sockets) - len(shown)
    who = "a worker" if process.answers else "gives no status"
    head = f"{process.pid} {process.name}: {who}, {len(process.sockets)} sockets"
    if local:
        head += f", {local} of them Unix sockets, which stay on this machine"
    if process.listed_by == "worker":
        head += " (as the worker itself lists them; root can ask the kernel)"
    if process.listed_by is None:
        head = f"{process.pid} {process.name}: its sockets are not known: run this as root"
    console.print(Text(printable(head), style="bold"))
    for group in process.groups:
        verdict = "sealed" if group.sealed else "not sealed"
        line = Text(f"  group {printable(group.name)}, {group.size} ranks, ")
        console.print(
            line.append(f"{printable(group.backend)}: ").append(verdict, style=_STYLES[verdict])
        )
    if shown:
        console.print(_table(shown))


def _table(sockets: list[WatchedSocket]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name in ("verdict", "from", "to", "what it is"):
        table.add_column(name, overflow="fold")
    for each in sorted(sockets, key=lambda one: (one.verdict, one.local, one.remote)):
        table.add_row(
            Text(each.verdict, style=_STYLES.get(each.verdict, "")),
            printable(each.local),
            printable(each.remote or each.state),
            Text(printable(each.why)),
        )
    return table


def _print_end(processes: list[WatchedProcess]) -> None:
    counts: dict[str, int] = {}
    for each in (socket for process in processes for socket in process.sockets):
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    console.print(f"{len(processes)} processes, sockets: {words or 'none'}.", highlight=False)
