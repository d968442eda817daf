"""`sealring bench vault`: sealed checkpoints and datasets against torch's own."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from sealring.bench.place import find_place
from sealring.bench.vault import Case, measure_vault
from sealring.bench.vault_datasets import measure_datasets
from sealring.bench.vault_on_gpu import measure_on_gpu
from sealring.cli.bench.options import AsJson, parse_size, several
from sealring.cli.terminal import console, errors, print_json
from sealring.errors import ConfigurationError

_MAX_RANKS: Final = 16


def vault(
    size: Annotated[str, typer.Option(help="Of checkpoint and dataset: 64MiB.")] = "256MiB",
    ranks: Annotated[str, typer.Option(help="Numbers of workers that save and load.")] = "1,2",
    part: Annotated[str, typer.Option(help="checkpoints, datasets or all.")] = "all",
    blocks: Annotated[int, typer.Option(min=1, help="Timed blocks of each variant.")] = 5,
    device: Annotated[
        str, typer.Option(help="cpu: checkpoints and datasets. cuda: what a GPU opens and parks.")
    ] = "cpu",
    directory: Annotated[Path, typer.Option(help="On the file system to measure.")] = Path(),
    json: AsJson = False,
) -> None:
    """Checkpoints and datasets, sealed against torch's own, alternately (medians)."""
    if part not in ("checkpoints", "datasets", "all"):
        raise ConfigurationError(f"--part {part}: it is checkpoints, datasets or all")
    if not os.access(directory, os.W_OK):
        raise ConfigurationError(f"{directory} is not a directory that can be written to")
    worlds = several(ranks, int) if re.fullmatch(r"\d{1,2}(,\d{1,2})*", ranks) else []
    if not worlds or min(worlds) < 1 or max(worlds) > _MAX_RANKS:
        raise ConfigurationError(f"--ranks {ranks!r}: write numbers from 1 to {_MAX_RANKS}, as 1,2")
    place = find_place(device)
    with errors.status("starting") as status:
        cases: list[Case] = []
        if place.kind == "cuda":
            cases += measure_on_gpu(place, directory, blocks, status.update)
        else:
            if part != "datasets":
                cases += measure_vault(directory, parse_size(size), worlds, blocks, status.update)
            if part != "checkpoints":
                cases += measure_datasets(directory, parse_size(size), blocks, status.update)
    if json:
        print_json({"cases": [asdict(case) for case in cases]})
        return
    table = Table("what", "ranks", "sealed GB/s", "plain GB/s", "ratio", "read / needed")
    for case in cases:
        share = "" if not case.bytes_needed else f"{(case.bytes_read or 0) / case.bytes_needed:.3f}"
        rates = (f"{one:.2f}" for one in (case.sealed_gb_s, case.plain_gb_s, case.ratio))
        table.add_row(case.what, str(case.ranks), *rates, share)
    console.print(table)
