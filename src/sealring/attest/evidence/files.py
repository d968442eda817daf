"""What evidence is judged by, read from files: the policy, and what the vendors say."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sealring.attest.evidence.cache import Cache, read_cache
from sealring.attest.evidence.policy import Policy
from sealring.attest.evidence.policy_file import parse_policy
from sealring.attest.evidence.trust import Trust
from sealring.errors import BadPolicy, ConfigurationError
from sealring.formats.files import read_public

_LOG = logging.getLogger("sealring")


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy, and the digest by which tokens and certificates name it."""
    content = read_public(path, "the policy", BadPolicy)
    try:
        return parse_policy(content.decode()), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError:
        raise BadPolicy(f"the policy {path} is not UTF-8 text") from None


def trust_in(policy: Policy, folder: Path | None) -> Callable[[], Trust]:
    """Trust at the present time; the folder is read again when something changes in it.

    A folder that cannot be read is an error at the start. Later what was read before stays in use,
    with the dates that it has, and the log says so: a file may be half written just now.
    """
    if folder is None:
        return lambda: Cache().trust(policy)
    kept = _Kept(folder)
    return lambda: kept.cache().trust(policy)


class _Kept:
    """What was last read of a folder, as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen = _state(folder)
        self._cache = read_cache(folder)
        self._read_at = datetime.now(UTC)

    def cache(self) -> Cache:
        with self._lock:
            try:
                now = _state(self._folder)
                if now != self._seen:
                    # Tried once for each state of the folder, whether it succeeds or not.
                    self._seen = now
                    self._cache, self._read_at = read_cache(self._folder), datetime.now(UTC)
            except ConfigurationError as problem:
                _LOG.error(
                    "%s. What was read of the cache at %s stays in use; put new files there under "
                    "another name and rename them",
                    problem, f"{self._read_at:%Y-%m-%d %H:%M:%S} UTC",
                )  # fmt: skip
            return self._cache


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        found = [(path.name, path.stat()) for path in folder.iterdir()]
    except OSError as problem:
        raise ConfigurationError(f"the cache {folder} cannot be read: {problem}") from None
    return tuple(sorted((name, each.st_mtime_ns, each.st_size) for name, each in found))
