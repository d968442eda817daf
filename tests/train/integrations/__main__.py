"""`make integrations` prints a table of the frameworks that ran and whether they were sealed.

The arguments are names of cases; without arguments all cases run.
"""

from __future__ import annotations

import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from tests.train.integrations.frameworks import (
    CASES,
    ON_CPU,
    TOLERANCE,
    Comparison,
    FrameworkFailed,
    compare,
    version_of,
)

SEALED = ["SealedProcessGroup"]


def main(*names: str) -> int:
    chosen = {name: CASES[name] for name in names or CASES}
    table = Table(
        "case", "framework", "version", "sealed", "difference", "seconds", box=box.SIMPLE,
        title=f"Sealed, and the largest difference to {'Gloo' if ON_CPU else 'NCCL'}",
    )  # fmt: skip
    progress = Console(stderr=True)
    bad = 0
    for number, (name, case) in enumerate(chosen.items(), 1):
        version = version_of(case.framework)
        progress.print(f"{time.strftime('%X')}  {number} of {len(chosen)}: {name}", highlight=False)
        if version is None:
            table.add_row(name, case.framework, "", "absent", "", "")
            continue
        try:
            found = compare(name)
        except FrameworkFailed as problem:
            progress.print(str(problem), markup=False, highlight=False, soft_wrap=True)
            table.add_row(name, case.framework, version, "failed", "", "")
            bad += 1
            continue
        bad += not _as_wanted(found)
        sealed = "yes" if found.groups == SEALED else ", ".join(found.groups)
        table.add_row(
            name, case.framework, version, sealed, f"{found.difference:g}", f"{found.seconds:.0f}"
        )
    Console().print(table)
    return 1 if bad else 0


def _as_wanted(found: Comparison) -> bool:
    return found.groups == SEALED and found.difference <= TOLERANCE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
