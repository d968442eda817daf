"""`sealring bench log`: what a transparency log costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench.log import ENTRY_BYTES, measure_log
from sealring.cli.bench.options import AsJson
from sealring.cli.terminal import console, print_json

_NAMES = {
    "append_per_s": "entries appended, one commit",
    "batch_per_s": "entries appended, commits of 256",
    "commits_per_s": "commits of one entry",
    "inclusion_proofs_per_s": "inclusion proofs made",
    "consistency_proofs_per_s": "consistency proofs made",
    "checked_proofs_per_s": "inclusion proofs checked",
    "verify_per_s": "entries verified, whole log",
    "witness_per_s": "checkpoints cosigned by one witness",
}


def log(
    entries: Annotated[int, typer.Option(min=1, help="How many the log has.")] = 100_000,
    folder: Annotated[
        Path | None, typer.Option(help="On which disk; the system's temporary one if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """A transparency log: appends, proofs, a check of the whole, a witness's answers."""
    found = measure_log(entries, folder).as_json()
    if json:
        print_json(found)
        return
    table = Table(title=f"a log of {found['entries']:,} entries of {ENTRY_BYTES} bytes")
    table.add_column("")
    table.add_column("a second", justify="right")
    for name, words in _NAMES.items():
        table.add_row(words, f"{found[name]:,}")
    console.print(table)
