"""Expecting an error of sealring's by its code, beside its class."""

from __future__ import annotations

from collections.abc import Callable

from sealring.errors import SealringError


def coded(code: str) -> Callable[[SealringError], bool]:
    """For `pytest.raises(..., check=coded("vault.later_version"))`."""

    def check(error: SealringError) -> bool:
        return error.code == code

    return check
