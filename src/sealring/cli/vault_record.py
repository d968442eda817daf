"""What `sealring vault ingest` and `build` write into a run's folder: signed transformations."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.errors import ConfigurationError, SealringError
from sealring.formats.strict import read_json
from sealring.record.recording.hooks import record_transformation
from sealring.record.statements.forms import Named, Transformation, parameters_of
from sealring.record.statements.run_folder import SUFFIX
from sealring.record.statements.signing import parse_statement, read_owner_key
from sealring.vault.datasets.building import Built
from sealring.vault.datasets.pipeline import lineage
from sealring.vault.vault import Vault
from sealring.version import __version__

Record = Annotated[
    Path | None, typer.Option(help="The folder of a run: a signed statement goes there.")
]
OwnerKey = Annotated[
    Path | None, typer.Option(help="What signs it: a key of `sealring audit init`.")
]


@dataclass(frozen=True, slots=True)
class Recorder:
    run: Path
    key: Ed25519PrivateKey
    started: int

    def write(self, vault: Vault, built: Built, source: str | None = None) -> None:
        """One statement for each content: what is there already is left."""
        made = next(lineage(vault, built.name, built.version))
        outputs = (Named(built.name, built.digest),)
        if outputs in set(_subjects(self.run)):
            return
        if source is None:
            inputs = [Named(one.name, one.digest) for one in made.inputs]
            code = Named(str(made.recipe["stage"]), str(made.recipe["code"]["sha256"]))
            done = self._done("stage", built, inputs, [code], made.recipe["parameters"])
        else:
            # Of a source its files' digests are not kept: the shards' sources stand for it.
            digest = hashlib.sha256("\n".join(made.sources).encode()).hexdigest()
            how = {"format": made.recipe["ingest"], "sealring": __version__}
            done = self._done("ingest", built, [Named(source, digest)], [], how)
        record_transformation(self.run, done, self.key)

    def _done(
        self, kind: Literal["ingest", "stage"], built: Built, inputs: list[Named],
        code: list[Named], parameters: Any,
    ) -> Transformation:  # fmt: skip
        return Transformation(
            kind, built.name, inputs, [Named(built.name, built.digest)], code,
            parameters_of(parameters), self.started, int(time.time()),
        )  # fmt: skip


def _subjects(run: Path) -> Iterator[tuple[Named, ...]]:
    """Of the statements in the folder, believed or not: they only keep this from repeating one."""
    for path in sorted((run / "statements").glob(f"*{SUFFIX}")):
        with contextlib.suppress(SealringError, ValueError, KeyError, TypeError, OSError):
            yield parse_statement(base64.b64decode(read_json(path.read_bytes())["payload"]))[0]


def recorder_of(record: Path | None, owner_key: Path | None) -> Callable[..., None]:
    """What is called for each dataset that was made; it does nothing without --record."""
    if (record is None) != (owner_key is None):
        raise ConfigurationError("--record and --owner-key go together: what is recorded is signed")
    if record is None or owner_key is None:
        return lambda *others: None
    return Recorder(record, read_owner_key(owner_key), int(time.time())).write
