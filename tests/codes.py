"""Expecting an error of sealring's by its code, beside its class."""

from __future__ import annotations

from collections.abc import Callable

from sealring.errors import SealringError


def coded(*codes: str) -> Callable[[SealringError], bool]:
    """For `pytest.raises(..., check=coded("vault.later_version"))`: the error has one of them."""

    def check(error: SealringError) -> bool:
        return error.code in codes

    return check
