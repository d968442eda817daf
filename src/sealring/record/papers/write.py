"""Everything that a model takes along, in one folder beside it.

model.sig           OpenSSF model signing's bundle, over all files of the model
export.dsse.json    the record of the export
slsa.dsse.json      SLSA's provenance, about the same root digest as the bundle
README.md           the model card
model.cdx.json      the bill of materials
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity.process import read_secret_file
from sealring.errors import ConfigurationError
from sealring.formats.files import not_written, write_public
from sealring.formats.strict import read_json
from sealring.record.papers.documents import (
    bill_of_materials,
    model_card,
    sign_slsa,
    slsa_statement,
)
from sealring.record.papers.facts import facts_of
from sealring.record.statements.forms import Named, digest_of_file
from sealring.record.statements.run_folder import RunFolder

# ---- OpenSSF model signing: a bundle over all files, which its own tool verifies


def sign_model(model: Path, key: Path, bundle: Path, files: Sequence[Named]) -> Named:
    """Signs the file or folder with an elliptic-curve key; what the bundle is about.

    `files` are the model's as the caller has read them. The tool reads them again: what it finds
    is compared before the key signs it.
    """
    try:
        from model_signing import hashing, signing
    except ImportError:
        raise ConfigurationError(
            "signing a model needs a package: pip install 'sealring[model-signing]'",
            code="configuration.missing_extra",
        ) from None
    # The tool does not ask who else can read it.
    read_secret_file(key, "the model's key", ConfigurationError).wipe()
    try:
        hasher = _Compared(hashing.Config(), model, files)  # type: ignore[no-untyped-call]
        configured: Any = signing.Config()  # type: ignore[no-untyped-call]
        configured.set_hashing_config(hasher).use_elliptic_key_signer(private_key=key)
        configured.sign(model, bundle)
    except (ValueError, OSError) as problem:
        raise ConfigurationError(
            f"{model} cannot be signed with {key}: {problem}. Make a key with `openssl ecparam "
            "-name prime256v1 -genkey -noout -out model.key`"
        ) from None
    return subject_of(bundle)


class _Compared:
    """In the place of the tool's own way to hash a model."""

    def __init__(self, hasher: Any, model: Path, files: Sequence[Named]) -> None:
        self._hasher = hasher
        # The tool calls a single file by a point.
        self._files = {one.name if model.is_dir() else ".": one.sha256 for one in files}

    def hash(self, model: Path) -> Any:
        manifest = self._hasher.hash(model)
        found = {
            one.identifier: one.digest.digest_value.hex() for one in manifest.resource_descriptors()
        }
        if found != self._files:
            name = min(name for name, _ in found.items() ^ self._files.items())
            raise ConfigurationError(
                f"{(model if name == '.' else name)!s} was changed before it could be signed, or "
                "is a file that model signing leaves out: nothing is signed"
            )
        return manifest


def subject_of(bundle: Path) -> Named:
    """Name and root digest of the model that a bundle is about. Checks nothing."""
    envelope = read_json(bundle.read_text())["dsseEnvelope"]
    (subject,) = read_json(base64.b64decode(envelope["payload"]))["subject"]
    return Named(subject["name"], subject["digest"]["sha256"])


# ---- all papers


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
    return [Named(path.relative_to(base).as_posix(), digest_of_file(path)) for path in paths]
