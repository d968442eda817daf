"""Lets a test expect one of sealring's errors by its code, besides its class."""

from __future__ import annotations

from collections.abc import Callable

from sealring.errors import SealringError


def coded(*codes: str) -> Callable[[SealringError], bool]:
    """Returns a check for `pytest.raises(..., check=coded("vault.later_version"))`."""

    def check(error: SealringError) -> bool:
        return error.code in codes

    return check
