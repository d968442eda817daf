"""`sealring vault ingest` and `build`: make datasets from files or datasets, and record it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sealring.cli.options import AsJson, parse_bytes
from sealring.cli.terminal import counted, human_bytes, print_json, say
from sealring.cli.vault_options import Target, byte_bar, owner_of
from sealring.errors import ConfigurationError, SealringError
from sealring.formats.strict import read_json
from sealring.record.recording.run import record_transformation
from sealring.record.statements.forms import Named, Transformation, parameters_of
from sealring.record.statements.run_folder import SUFFIX
from sealring.record.statements.signing import parse_statement
from sealring.vault.datasets.building import Ancestor, Built, lineage, run_stages, stages_of
from sealring.vault.datasets.building import ingest as ingest_source
from sealring.vault.datasets.formats import Limits
from sealring.vault.datasets.on_ray import OnRay, VaultReference
from sealring.vault.datasets.work import InProcesses, Run
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault
from sealring.version import __version__

_SUITES: Final = {"aes-256-gcm": AES, "chacha20-poly1305": CHACHA}
Processes = Annotated[
    int | None, typer.Option(min=1, max=256, help="That work at the same time; else the CPUs.")
]
Record = Annotated[
    Path | None, typer.Option(help="The folder of a run: a signed statement goes there.")
]
OwnerKey = Annotated[
    Path | None, typer.Option(help="What signs it: a key of `sealring audit init`.")
]
Engine = Annotated[
    str, typer.Option(help="local, or ray: on the cluster of RAY_ADDRESS (the extra ray).")
]
Suite = Annotated[
    str | None,
    typer.Option(help="aes-256-gcm, or chacha20-poly1305 for what a GPU opens; else the vault's."),
]


def ingest(
    target: Target,
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
    as_json: AsJson = False,
) -> None:
    """Seal data as shards of a dataset. Run again, it goes on where it was stopped."""
    limits = Limits(parse_bytes(shard_size), parse_bytes(largest_sample))
    called = source.absolute().stem if name is None else name
    chosen = _suite_named(suite)
    write_record = _recorder_of(record, owner_key)
    opened = target.open()
    with _running(engine, processes, opened, target) as run:
        built = ingest_source(
            opened, source, called, run, form=form, dtype=dtype, suite=chosen, limits=limits,
            bar=byte_bar,
        )  # fmt: skip
    write_record(opened, built, str(source))
    _tell(built, as_json=as_json)


def build(
    target: Target,
    pipeline: Annotated[Path, typer.Argument(help="A Python file with a list STAGES.")],
    suite: Suite = None,
    processes: Processes = None,
    engine: Engine = "local",
    record: Record = None,
    owner_key: OwnerKey = None,
    as_json: AsJson = False,
) -> None:
    """Make datasets from datasets, stage by stage: only what a change has touched."""
    chosen = _suite_named(suite)
    write_record = _recorder_of(record, owner_key)
    stages = stages_of(pipeline)
    opened = target.open()
    made = []
    with _running(engine, processes, opened, target) as run:
        for built in run_stages(opened, stages, run, suite=chosen, bar=byte_bar):
            made.append(built)
            write_record(opened, built)
    if as_json:
        print_json({"stages": [asdict(one) for one in made]})
        return
    for built in made:
        _tell(built, as_json=False)


def lineage_table(found: Sequence[Ancestor]) -> Table:
    """A table of what a dataset was made from, by which code and with which parameters."""
    table = Table("dataset", "version", "samples", "digest", "made by", "of")
    for one in found:
        how = f"ingest of {one.recipe['ingest']}" if "ingest" in one.recipe else _stage(one.recipe)
        of = ", ".join(f"{each.name} {each.version}" for each in one.inputs)
        table.add_row(
            Text(one.name), str(one.version), str(one.samples), one.digest[:12], Text(how), Text(of)
        )
    return table


def _stage(recipe: dict[str, Any]) -> str:
    parameters = ", ".join(f"{name}={value!r}" for name, value in recipe["parameters"].items())
    return f"{recipe['stage']}({parameters}), code {recipe['code']['sha256'][:12]}"


@contextmanager
def _running(engine: str, processes: int | None, vault: Vault, target: Target) -> Iterator[Run]:
    if engine == "local":
        with InProcesses(processes or len(os.sched_getaffinity(0))) as run:
            yield run
    elif engine == "ray":
        if processes is not None:
            raise ConfigurationError("--processes is for --engine local: Ray has its own number")
        path = None if target.key is None else str(target.key.absolute())
        where = VaultReference(str(vault.path.absolute()), vault.header.id, path, target.broker)
        with OnRay(where) as on_ray:
            yield on_ray
    else:
        raise ConfigurationError(f"--engine {engine}: it is local or ray")


def _suite_named(name: str | None) -> str | None:
    if name is not None and name not in _SUITES:
        raise ConfigurationError(f"--suite {name}: it is {' or '.join(_SUITES)}")
    return None if name is None else _SUITES[name]


def _tell(built: Built, *, as_json: bool) -> None:
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


def _subjects(run: Path) -> Iterator[tuple[Named, ...]]:
    """The subjects of the folder's statements, not verified: used only to avoid a second
    statement."""
    for path in sorted((run / "statements").glob(f"*{SUFFIX}")):
        with contextlib.suppress(SealringError, ValueError, KeyError, TypeError, OSError):
            yield parse_statement(base64.b64decode(read_json(path.read_bytes())["payload"]))[0]


def _recorder_of(record: Path | None, owner_key: Path | None) -> Callable[..., None]:
    """Returns a function to call for each dataset that was made. Without --record it does
    nothing."""
    key = owner_of(record, owner_key)
    if record is None or key is None:
        return lambda *others: None
    started = int(time.time())

    def write(vault: Vault, built: Built, source: str | None = None) -> None:
        """Writes a statement for a dataset, unless there is one for the same content."""
        made = next(lineage(vault, built.name, built.version))
        output = Named(built.name, built.digest)
        if (output,) in set(_subjects(record)):
            return
        inputs, code = [Named(one.name, one.digest) for one in made.inputs], []
        if source is None:
            code = [Named(str(made.recipe["stage"]), str(made.recipe["code"]["sha256"]))]
            how = made.recipe["parameters"]
        else:
            # The digests of a source's files are not kept; the digest covers the shards' sources.
            inputs = [Named(source, hashlib.sha256("\n".join(made.sources).encode()).hexdigest())]
            how = {"format": made.recipe["ingest"], "sealring": __version__}
        done = Transformation(
            "ingest" if source else "stage", built.name, inputs, [output], code,
            parameters_of(how), started, int(time.time()),
        )  # fmt: skip
        record_transformation(record, done, key)

    return write
