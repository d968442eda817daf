"""`sealring vault ingest`, `build` and `lineage`: datasets, and datasets made from datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from sealring.cli.sizes import parse_bytes
from sealring.cli.terminal import console, counted, human_bytes, print_json, progress_bar, say
from sealring.cli.vault_options import (
    AsJson,
    Broker,
    Directory,
    Identity,
    Key,
    VaultId,
    Version,
    opener_of,
)
from sealring.cli.vault_record import OwnerKey, Record, recorder_of
from sealring.errors import ConfigurationError
from sealring.vault.datasets.building import Built
from sealring.vault.datasets.ingest import ingest as ingest_source
from sealring.vault.datasets.on_ray import OnRay, VaultReference
from sealring.vault.datasets.pipeline import lineage as ancestors
from sealring.vault.datasets.pipeline import run_stages, stages_of
from sealring.vault.datasets.running import InProcesses, Run
from sealring.vault.datasets.sources import Limits
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault

Progress = Callable[[int], None]
_SUITES: Final = {"aes-256-gcm": AES, "chacha20-poly1305": CHACHA}
Processes = Annotated[
    int | None, typer.Option(min=1, max=256, help="That work at the same time; else the CPUs.")
]
Engine = Annotated[
    str, typer.Option(help="local, or ray: on the cluster of RAY_ADDRESS (the extra ray).")
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
    engine: Engine = "local",
    record: Record = None,
    owner_key: OwnerKey = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Seal data as shards of a dataset. Run again, it goes on where it was stopped."""
    limits = Limits(parse_bytes(shard_size), parse_bytes(largest_sample))
    called = source.absolute().stem if name is None else name
    chosen = suite_named(suite)
    write_record = recorder_of(record, owner_key)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    with (
        running(engine, processes, opened, key, broker) as run,
        bar(f"sealing {called}") as (expect, done),
    ):
        built = ingest_source(
            opened, source, called, run, form=form, dtype=dtype, suite=chosen, limits=limits,
            progress=done, expect=expect,
        )  # fmt: skip
    write_record(opened, built, str(source))
    tell(built, as_json=as_json)


def build(
    vault: Directory,
    pipeline: Annotated[Path, typer.Argument(help="A Python file with a list STAGES.")],
    suite: Suite = None,
    processes: Processes = None,
    engine: Engine = "local",
    record: Record = None,
    owner_key: OwnerKey = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Make datasets from datasets, stage by stage: only what a change has touched."""
    chosen = suite_named(suite)
    write_record = recorder_of(record, owner_key)
    stages = stages_of(pipeline)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    made = []
    with running(engine, processes, opened, key, broker) as run, progress_bar() as shown:
        tasks: dict[str, TaskID] = {}

        def expect(name: str, total: int) -> None:
            tasks[name] = shown.add_task(escape(f"making {name}"), total=max(1, total))

        def advance(name: str, count: int) -> None:
            shown.advance(tasks[name], count)

        for built in run_stages(opened, stages, run, suite=chosen, progress=advance, expect=expect):
            made.append(built)
            write_record(opened, built)
            shown.update(tasks[built.name], completed=shown.tasks[tasks[built.name]].total)
    if as_json:
        print_json({"stages": [asdict(one) for one in made]})
        return
    for built in made:
        tell(built, as_json=False)


def lineage(
    vault: Directory,
    name: Annotated[str, typer.Argument(help="A dataset.")],
    version: Version = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Show what a dataset was made from, by which code and with which parameters."""
    opened = Vault.open(vault, opener_of(key, broker, identity), vault_id)
    found = list(ancestors(opened, name, version))
    if as_json:
        print_json({"datasets": [asdict(one) for one in found]})
        return
    table = Table("dataset", "version", "samples", "digest", "made by", "of")
    for one in found:
        how = f"ingest of {one.recipe['ingest']}" if "ingest" in one.recipe else _stage(one.recipe)
        of = ", ".join(f"{each.name} {each.version}" for each in one.inputs)
        table.add_row(
            Text(one.name), str(one.version), str(one.samples), one.digest[:12], Text(how), Text(of)
        )
    console.print(table)


def _stage(recipe: dict[str, Any]) -> str:
    parameters = ", ".join(f"{name}={value!r}" for name, value in recipe["parameters"].items())
    return f"{recipe['stage']}({parameters}), code {recipe['code']['sha256'][:12]}"


@contextmanager
def running(
    engine: str, processes: int | None, vault: Vault, key: Path | None, broker: str | None
) -> Iterator[Run]:
    if engine == "local":
        with InProcesses(processes or usable_cpus()) as run:
            yield run
    elif engine == "ray":
        if processes is not None:
            raise ConfigurationError("--processes is for --engine local: Ray has its own number")
        path = None if key is None else str(key.absolute())
        where = VaultReference(str(vault.path.absolute()), vault.header.id, path, broker)
        with OnRay(where) as on_ray:
            yield on_ray
    else:
        raise ConfigurationError(f"--engine {engine}: it is local or ray")


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
        f"{counted(built.samples, 'sample')} in {counted(built.shards, 'shard')}, "
        f"{human_bytes(built.bytes)}; digest "
        f"{built.digest}"
    )
    if built.changed:
        say(f"{built.name} is sealed as version {built.version}: {what}.")
        if built.made < built.shards:
            say(f"Made now: {counted(built.made, 'shard')}; the others were there.")
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
