"""OpenSSF model signing: a bundle over all files of a model, which its own tool verifies."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from sealring.errors import ConfigurationError, MissingExtra
from sealring.provenance.digests import Named


def sign_model(model: Path, key: Path, bundle: Path) -> Named:
    """Signs the file or folder with an elliptic-curve key; what the bundle is about."""
    try:
        from model_signing import signing
    except ImportError:
        raise MissingExtra(
            "signing a model needs a package: pip install 'sealring[model-signing]'"
        ) from None
    try:
        configured: Any = signing.Config()  # type: ignore[no-untyped-call]
        configured.use_elliptic_key_signer(private_key=key).sign(model, bundle)
    except (ValueError, OSError) as problem:
        raise ConfigurationError(
            f"{model} cannot be signed with {key}: {problem}. Make a key with `openssl ecparam "
            "-name prime256v1 -genkey -noout -out model.key`"
        ) from None
    return subject_of(bundle)


def subject_of(bundle: Path) -> Named:
    """Name and root digest of the model that a bundle is about. Checks nothing."""
    envelope = json.loads(bundle.read_text())["dsseEnvelope"]
    (subject,) = json.loads(base64.b64decode(envelope["payload"]))["subject"]
    return Named(subject["name"], subject["digest"]["sha256"])
