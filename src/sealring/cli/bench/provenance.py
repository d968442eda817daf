"""`sealring bench provenance`: what signed statements of a run cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench.provenance import measure_provenance
from sealring.cli.terminal import console, errors, print_json


def provenance(
    model: Annotated[str, typer.Option(help="What is trained.")] = "gpt-small",
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Workers.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between two statements.")] = 10,
    blocks: Annotated[int, typer.Option(min=2, help="Timed intervals of each variant.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="On which disk; the system's temporary one if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Training steps with signed statements against the same without, alternately (medians)."""
    with errors.status("training") as status:
        found = measure_provenance(
            model, ranks=ranks, batch=batch, every=every, blocks=blocks, folder=folder,
            progress=lambda done: status.update(f"training: {done:.0%}"),
        )  # fmt: skip
    if json:
        print_json(found.as_json())
        return
    title = f"{found.model}, {found.ranks} ranks, a statement every {found.every} steps"
    table = Table("", "", title=title)
    table.add_row("step with statements", f"{found.recorded_ms:,.1f} ms")
    table.add_row("step without", f"{found.unrecorded_ms:,.1f} ms")
    noise = "" if found.told is not None else f" (within the noise of {found.noise:.1%})"
    table.add_row("ratio", f"{found.ratio:.4f}{noise}; bar {found.bar}")
    table.add_row("bytes per rank and interval", f"{found.bytes_per_statement:,.0f}")
    table.add_row("bytes of the folder", f"{found.disk_bytes:,}")
    console.print(table)
