"""The record of an ingest, a stage, an export or an evaluation, in the folder of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity.credentials import Credentials
from sealring.record.provenance.runs import open_run, write_statement
from sealring.record.provenance.statements import sign_statement, statement_digest
from sealring.record.provenance.transformations import Transformation
from sealring.record.recording.run_log import RunLog


def record_transformation(
    run: Path,
    transformation: Transformation,
    signer: Credentials | Ed25519PrivateKey,
    authorities: Sequence[x509.Certificate] = (),
) -> Path:
    """Signs it and writes it into the run's folder; into its log as well where its key is here.

    Before training there is no log yet: rank 0 then logs what it finds. `authorities` are those of
    the run's workers, whose statements may still have to be logged.
    """
    run = run.absolute()
    envelope = sign_statement(transformation, signer)
    name = f"{transformation.kind}-{statement_digest(envelope)[:16]}"
    path = write_statement(run, name, envelope)
    if (run / "run.json").exists() and (folder := open_run(run)).key.exists():
        RunLog(folder, authorities).append_new()
    return path
