"""`sealring bench provenance`: what records and audits cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench.audit import measure_audit
from sealring.cli.terminal import console, errors, human_bytes, print_json


def provenance(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Of the audited run.")] = 16,
    intervals: Annotated[int, typer.Option(min=1, help="Statements of each rank.")] = 100,
    folder: Annotated[
        Path | None, typer.Option(help="On which disk; the system's temporary one if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The audit of an honest run, and opening its page in Chromium where there is one."""
    with errors.status(f"auditing a run of {ranks} ranks and {intervals} intervals"):
        found = measure_audit(ranks, intervals, folder)
    if json:
        print_json({"audit": found.as_json()})
        return
    table = Table(title=f"An audit of {found.statements:,} statements ({ranks} ranks)")
    table.add_column("")
    table.add_column("took", justify="right")
    table.add_row("audit", f"{found.seconds:g} s ({found.cpu_seconds:g} s of one core)")
    table.add_row(f"page of {human_bytes(found.page_bytes)}", f"{found.page_seconds:g} s")
    opened = "no browser here" if found.opened_ms is None else f"{found.opened_ms:g} ms"
    table.add_row("opening it", opened)
    table.add_row("a statement", f"{found.statement_bytes:,} bytes")
    console.print(table)
