"""Everything that a model takes along, in one folder beside it.

model.sig           OpenSSF model signing's bundle, over all files of the model
export.dsse.json    the record of the export
slsa.dsse.json      SLSA's provenance, about the same root digest as the bundle
README.md           the model card
model.cdx.json      the bill of materials
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.errors import ConfigurationError
from sealring.formats.files import not_written, write_public
from sealring.record.papers.bom import bill_of_materials
from sealring.record.papers.bundle import sign_model
from sealring.record.papers.card import model_card
from sealring.record.papers.facts import facts_of
from sealring.record.papers.slsa import sign_slsa, slsa_statement
from sealring.record.provenance.digests import Named
from sealring.record.provenance.runs import RunFolder


def write_papers(
    model: Path,
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    owner: Ed25519PrivateKey,
    model_key: Path,
    out: Path,
    job: str | None = None,
) -> list[Path]:
    """The files written. `model` is a file that an export of the run wrote, or a folder of such.

    `job` is the one that the run must be of; None: what `run.json` names, which is not signed.
    """
    files = files_of(model)
    facts = facts_of(run, authorities, [owner.public_key()], job)
    (export, envelope), *others = [facts.export_of(one.sha256) for one in files]
    if any(other != envelope for _, other in others):
        raise ConfigurationError(
            f"the files of {model} are of several exports, and papers are of one: write them apart"
        )
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise ConfigurationError(f"{out} is there already: choose another folder") from None
    except OSError as problem:
        raise not_written(out, problem, "made") from None
    try:
        root = sign_model(model, model_key, out / "model.sig", files)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    about = [root, *(one for one in files if one.sha256 != root.sha256)]
    written = {
        "export.dsse.json": envelope,
        "slsa.dsse.json": sign_slsa(slsa_statement(facts, export, about), owner),
        "README.md": model_card(facts, export, files).encode(),
        "model.cdx.json": bill_of_materials(facts, export, files),
    }
    for name, content in written.items():
        write_public(out / name, content)
    return [out / "model.sig", *(out / name for name in written)]


def files_of(model: Path) -> list[Named]:
    paths = sorted(one for one in model.rglob("*") if one.is_file()) if model.is_dir() else [model]
    if not paths:
        raise ConfigurationError(f"{model} has no files")
    base = model if model.is_dir() else model.parent
    return [Named(path.relative_to(base).as_posix(), digest_of(path)) for path in paths]


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from None
