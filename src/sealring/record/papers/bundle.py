"""OpenSSF model signing: a bundle over all files of a model, which its own tool verifies."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sealring.core.identity.private_files import read_secret_file
from sealring.errors import ConfigurationError, MissingExtra
from sealring.formats.strict import read_json
from sealring.record.provenance.digests import Named


def sign_model(model: Path, key: Path, bundle: Path, files: Sequence[Named]) -> Named:
    """Signs the file or folder with an elliptic-curve key; what the bundle is about.

    `files` are the model's as the caller has read them. The tool reads them again: what it finds
    is compared before the key signs it.
    """
    try:
        from model_signing import hashing, signing
    except ImportError:
        raise MissingExtra(
            "signing a model needs a package: pip install 'sealring[model-signing]'"
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
