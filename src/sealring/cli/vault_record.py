"""What `sealring vault ingest` and `build` write into a run's folder: signed transformations."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.errors import ConfigurationError
from sealring.provenance.digests import Named
from sealring.provenance.owners import read_owner_key
from sealring.provenance.runs import RunFolder, open_run
from sealring.provenance.statements import sign_statement
from sealring.provenance.transformations import Transformation, parameters_of
from sealring.vault.datasets import formats
from sealring.vault.datasets.building import Built
from sealring.vault.datasets.pipeline import Ancestor, lineage
from sealring.vault.vault import Vault

Record = Annotated[
    Path | None, typer.Option(help="The folder of a run: a signed statement goes there.")
]
OwnerKey = Annotated[
    Path | None, typer.Option(help="What signs it: a key of `sealring statement key`.")
]


@dataclass(frozen=True, slots=True)
class Recorder:
    run: RunFolder
    key: Ed25519PrivateKey
    started: int

    def write(self, vault: Vault, built: Built, source: str | None = None) -> None:
        """One statement for each content: what is there already is left."""
        made = next(lineage(vault, built.name, built.version))
        kind: Literal["ingest", "stage"] = "ingest" if source is not None else "stage"
        name = f"{kind}-{_slug(built.name)}-{built.digest[:16]}"
        if self.run.statement_path(name).exists():
            return
        code = Path(formats.__file__).read_bytes() if source is not None else _code(made)
        self.run.write_evidence(code)
        # Of a source its files' digests are not kept: the shards' sources stand for it.
        sources = hashlib.sha256("\n".join(made.sources).encode()).hexdigest()
        inputs = [Named(one.name, one.digest) for one in made.inputs]
        statement = Transformation(
            kind, built.name,
            inputs if source is None else [Named(source, sources)],
            [Named(built.name, built.digest)],
            [Named(str(made.recipe.get("stage", "formats.py")), hashlib.sha256(code).hexdigest())],
            parameters_of(made.recipe.get("parameters", {"format": made.recipe.get("ingest")})),
            self.started, int(time.time()),
        )  # fmt: skip
        self.run.write_statement(name, sign_statement(statement, self.key))


def recorder_of(record: Path | None, owner_key: Path | None) -> Callable[..., None]:
    """What is called for each dataset that was made; it does nothing without --record."""
    if (record is None) != (owner_key is None):
        raise ConfigurationError("--record and --owner-key go together: what is recorded is signed")
    if record is None or owner_key is None:
        return lambda *others: None
    return Recorder(open_run(record), read_owner_key(owner_key), int(time.time())).write


def _code(made: Ancestor) -> bytes:
    return str(made.recipe["code"]["text"]).encode()


def _slug(name: str) -> str:
    return re.sub(r"[^0-9a-z]+", "-", name.lower()).strip("-")[:40] or "dataset"
