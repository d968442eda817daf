"""`sealring bench provenance`: what signed statements of a run and their audit cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench.audit import AuditCost, measure_audit
from sealring.bench.recording import RecordingCost, measure_recording
from sealring.cli.bench.options import AsJson, several
from sealring.cli.terminal import console, errors, human_bytes, print_json
from sealring.errors import ConfigurationError


def provenance(
    model: Annotated[str, typer.Option(help="What is trained.")] = "gpt-small",
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Workers that train.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between two statements.")] = 10,
    blocks: Annotated[int, typer.Option(min=2, help="Timed intervals of each variant.")] = 11,
    audits: Annotated[
        str, typer.Option(help="Runs that are audited: ranks x intervals, with commas between.")
    ] = "10x100,16x100",
    folder: Annotated[
        Path | None, typer.Option(help="On which disk; the system's temporary one if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Training steps with signed statements against the same without, alternately; audits of whole
    runs, and opening their pages in Chromium where there is one."""
    sizes = several(audits, _size)
    with errors.status("training") as status:
        step = measure_recording(
            model, ranks=ranks, batch=batch, every=every, blocks=blocks, folder=folder,
            progress=lambda done: status.update(f"training: {done:.0%}"),
        )  # fmt: skip
        found = []
        for of_ranks, intervals in sizes:
            status.update(f"auditing a run of {of_ranks} ranks and {intervals} intervals")
            found.append(measure_audit(of_ranks, intervals, folder))
    if json:
        print_json({"step": step.as_json(), "audits": [each.as_json() for each in found]})
        return
    console.print(_steps(step))
    console.print(_audits(found))


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or int(match[1]) < 2 or int(match[2]) < 1:
        raise ConfigurationError(
            f"{text!r} is no size of a run: write ranks x intervals, as 16x100, from 2x1 on"
        )
    return int(match[1]), int(match[2])


def _steps(found: RecordingCost) -> Table:
    title = f"{found.model}, {found.ranks} ranks, a statement every {found.every} steps"
    table = Table("", "", title=title)
    table.add_row("step with statements", f"{found.recorded_ms:,.1f} ms")
    table.add_row("step without", f"{found.unrecorded_ms:,.1f} ms")
    noise = "" if found.told is not None else f" (within the noise of {found.noise:.1%})"
    table.add_row("ratio", f"{found.ratio:.4f}{noise}; bar {found.bar}")
    table.add_row("bytes per rank and interval", f"{found.bytes_per_statement:,.0f}")
    table.add_row("bytes of the folder", f"{found.disk_bytes:,}")
    return table


def _audits(found: list[AuditCost]) -> Table:
    table = Table("run", title="Audits")
    for column in ("statements", "audit", "of one core", "page", "opened after"):
        table.add_column(column, justify="right")
    for each in found:
        opened = "no browser here" if each.opened_ms is None else f"{each.opened_ms:g} ms"
        table.add_row(
            f"{each.ranks} ranks, {each.intervals} intervals",
            f"{each.statements:,} of {each.statement_bytes:,} bytes",
            f"{each.seconds:g} s",
            f"{each.cpu_seconds:g} s",
            human_bytes(each.page_bytes),
            opened,
        )
    return table
