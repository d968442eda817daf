"""What evidence is judged by, read from files: the policy, and what the vendors say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from sealring.errors import BadPolicy, ConfigurationError
from sealring.identity.attestation.cache import Cache, read_cache
from sealring.identity.attestation.policy import Policy
from sealring.identity.attestation.policy_file import parse_policy
from sealring.identity.attestation.roots import Trust
from sealring.identity.private_files import read_public


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy, and the digest by which tokens and certificates name it."""
    content = read_public(path, "the policy", BadPolicy)
    try:
        return parse_policy(content.decode()), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError:
        raise BadPolicy(f"the policy {path} is not UTF-8 text") from None


def trust_in(policy: Policy, folder: Path | None) -> Callable[[], Trust]:
    """Trust at the present time; the folder is read again when something changes in it."""
    seen: tuple[tuple[str, int], ...] | None = None
    cache = Cache()

    def trust() -> Trust:
        nonlocal seen, cache
        if folder is not None and (now := _state(folder)) != seen:
            cache, seen = read_cache(folder), now
        return cache.trust(policy)

    trust()  # what cannot be read is better said at the start
    return trust


def _state(folder: Path) -> tuple[tuple[str, int], ...]:
    try:
        return tuple(sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()))
    except OSError as problem:
        raise ConfigurationError(f"the cache {folder} cannot be read: {problem}") from None
