"""Turns sealed-only mode on. Loads nothing of torch's until torch.distributed is loaded."""

from __future__ import annotations

import sys

from sealring.core.sealed_only import children


def require_sealed() -> None:
    """From here on, every process group of this process and of its children is sealed.

    A group of another backend is served by sealring in its place where that is possible; otherwise
    `PlaintextGroup` names the line that asked for it. Groups that were made before are not changed:
    if one of them is in plaintext, this raises `PlaintextGroup`. Cannot be taken back.
    """
    children.watch()
    if "torch.distributed" in sys.modules:
        guard()
        from sealring.core.sealed_only import groups

        groups.refuse_existing()


def guard() -> None:
    """Called where torch.distributed is loaded; a second call changes nothing.

    Groups that exist are left alone: those that a forked child finds are its parent's.
    """
    from sealring.core.sealed_only import classes, frameworks, groups

    groups.seal_by_default()
    classes.refuse_all()
    frameworks.close_as_they_load()
    children.watch()
