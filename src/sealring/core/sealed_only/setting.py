"""Whether a process is in sealed-only mode: by SEALRING_ONLY, or because one above it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sealring.core.sealed_only import mark
from sealring.errors import ConfigurationError

SETTING: Final = "SEALRING_ONLY"
OFF: Final = ("", "0")

_on = False


def turn_on() -> None:
    """For good: libraries may empty the environment for a while (accelerate does)."""
    global _on
    _on = True


def is_on() -> bool:
    """Whether it was turned on in this process."""
    return _on


def is_required(environ: Mapping[str, str]) -> bool:
    value = environ.get(SETTING, "")
    if value not in (*OFF, "1"):
        raise ConfigurationError(f"{SETTING} is {value!r}; set it to 1, or unset it")
    return _on or value == "1" or mark.is_inherited()


def refuse_to_measure(environ: Mapping[str, str]) -> None:
    if is_required(environ):
        raise ConfigurationError(
            f"this command measures plaintext groups beside sealed ones: unset {SETTING}, and do "
            "not start it from a sealed-only job"
        )


def may_be_required(environ: Mapping[str, str]) -> bool:
    """True for a value that is refused later, too.

    An error while torch is imported would be reported by torch, with the advice to switch off the
    loading of backends. So a wrong value is reported when the first group is made.
    """
    return _on or environ.get(SETTING, "") not in OFF or mark.is_inherited()
