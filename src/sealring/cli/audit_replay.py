"""What `sealring audit --replay` needs beside the run's folder: a seed and a vault."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

from sealring.cli.vault_options import opener_of
from sealring.errors import ConfigurationError
from sealring.record.audit.trust import AuditTrust
from sealring.record.provenance.intervals import CheckpointRef
from sealring.record.provenance.replay import Compare, Difference, Repeated
from sealring.record.provenance.runs import open_run

_SEED_DIGITS = 64


def seed_from(text: str | None) -> bytes:
    """Of an earlier audit, or a new one."""
    if text is None:
        return secrets.token_bytes(_SEED_DIGITS // 2)
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(text) != _SEED_DIGITS or len(found) != _SEED_DIGITS // 2:
        raise ConfigurationError(
            f"--replay-seed has {_SEED_DIGITS} hexadecimal digits, as `audit --json` prints it"
        )
    return found


def compared_in(
    vault: Path | None, key: Path | None, tolerance: float, run: Path, trust: AuditTrust
) -> Compare | None:
    """Compares a repetition's checkpoint with the recorded one; None: only the same bits count."""
    if not math.isfinite(tolerance):
        raise ConfigurationError("--replay-tolerance is a finite number, such as 1e-5")
    if vault is None:
        if tolerance:
            raise ConfigurationError(
                "a tolerance needs the checkpoints themselves: name the copy of the vault that the "
                "script writes to, --replay-vault DIR, and what opens it, --key FILE"
            )
        return None
    opener, job = opener_of(key, None, None), open_run(run).head.job

    def compare(recorded: CheckpointRef, repeated: Repeated) -> Difference:
        # With torch, which an audit does not need otherwise.
        from sealring.vault import Vault
        from sealring.vault.checkpoint_difference import NamedCheckpoint, largest_difference

        found = largest_difference(
            Vault.open(vault, opener),
            NamedCheckpoint(
                recorded.name, recorded.sha256, recorded.content, trust.authorities, job
            ),
            NamedCheckpoint(
                repeated.checkpoint.name,
                repeated.checkpoint.sha256,
                repeated.checkpoint.content,
                repeated.authorities,
                repeated.job,
            ),
        )
        return Difference(*found)

    return compare
