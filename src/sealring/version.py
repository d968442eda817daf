"""The version of this package, and the versions of torch that it was tested with.

It is a separate module so that every layer can import it. The package's version comes from git's
tags when the package is built or installed; see CONTRIBUTING.md, Releases.
"""

from importlib.metadata import version
from typing import Final

__version__: Final = version("sealring")

TESTED_TORCH: Final = ((2, 11), (2, 15))
"""The oldest and newest version that passed `make torch-versions`, as in pyproject.toml."""


def untested_torch(torch: str) -> str:
    """Returns '' for a version of torch that was tested, else a sentence that says so."""
    low, high = TESTED_TORCH
    number = tuple(int(part) for part in torch.partition("+")[0].split(".")[:2])
    if low <= number <= high:
        return ""
    tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return (
        f"torch {torch} was not tested with sealring {__version__}, which supports {tested}. If it "
        "fails, install one of these"
    )
