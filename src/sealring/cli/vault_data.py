"""`sealring vault ingest` and `build`: datasets, and datasets made from datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from sealring.cli.bench.options import parse_size
from sealring.cli.terminal import human_bytes, print_json, progress_bar, say
from sealring.cli.vault_options import AsJson, Broker, Directory, Key, VaultId, opener_of
from sealring.errors import ConfigurationError
from sealring.vault.datasets.building import Built
from sealring.vault.datasets.ingest import ingest as ingest_source
from sealring.vault.datasets.running import InProcesses
from sealring.vault.datasets.sources import Limits
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault

Progress = Callable[[int], None]
_SUITES: Final = {"aes-256-gcm": AES, "chacha20-poly1305": CHACHA}
Processes = Annotated[
    int | None, typer.Option(min=1, max=256, help="That work at the same time; else the CPUs.")
]
Suite = Annotated[
    str | None,
    typer.Option(help="aes-256-gcm, or chacha20-poly1305 for what a GPU opens; else the vault's."),
]


def ingest(
    vault: Directory,
    source: Annotated[
        Path, typer.Argument(help="A file or folder: Parquet, JSON lines, tars, images, tokens.")
    ],
    name: Annotated[str | None, typer.Option(help="The dataset's name; else SOURCE's.")] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="parquet, jsonl, webdataset, images or tokens; else by the files' endings.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the tokens in .bin files: uint16 or uint32.")
    ] = None,
    suite: Suite = None,
    shard_size: Annotated[str, typer.Option(help="Of the source, for one shard.")] = "64MiB",
    largest_sample: Annotated[str, typer.Option(help="A larger one is refused.")] = "64MiB",
    processes: Processes = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Seal data as shards of a dataset. Run again, it goes on where it was stopped."""
    limits = Limits(parse_size(shard_size), parse_size(largest_sample))
    called = source.absolute().stem if name is None else name
    chosen = suite_named(suite)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    with InProcesses(processes or usable_cpus()) as run, bar(f"sealing {called}") as (expect, done):
        built = ingest_source(
            opened, source, called, run, form=form, dtype=dtype, suite=chosen, limits=limits,
            progress=done, expect=expect,
        )  # fmt: skip
    tell(built, as_json=as_json)


def suite_named(name: str | None) -> str | None:
    if name is not None and name not in _SUITES:
        raise ConfigurationError(f"--suite {name}: it is {' or '.join(_SUITES)}")
    return None if name is None else _SUITES[name]


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def tell(built: Built, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(built))
        return
    what = (
        f"{built.samples} samples in {built.shards} shards, {human_bytes(built.bytes)}; digest "
        f"{built.digest}"
    )
    if built.changed:
        say(f"{built.name} is sealed as version {built.version}: {what}.")
        say(f"{built.made} shards were made now; the others were there.")
    else:
        say(f"{built.name} is there as version {built.version}, and nothing was changed: {what}.")


@contextmanager
def bar(what: str) -> Iterator[tuple[Progress, Progress]]:
    """What is to be called with the number of bytes in all, and with those done since."""
    with progress_bar("{task.percentage:>3.0f} %") as shown:
        task = shown.add_task(escape(what), total=None)
        yield (
            lambda total: shown.update(task, total=max(1, total)),
            lambda count: shown.advance(task, count),
        )
