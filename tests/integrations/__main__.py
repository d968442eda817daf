"""`make integrations`: a table of the frameworks that were run, and whether they were sealed."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.integrations.frameworks import CASES, compare, version_of


def main() -> int:
    table = Table("case", "framework", "version", "sealed", "largest difference to Gloo")
    bad = 0
    for name, case in track(CASES.items(), "Running", console=Console(stderr=True)):
        if version_of(case.framework) is None:
            table.add_row(name, case.framework, "", "not installed", "")
            continue
        found = compare(name)
        sealed = found.groups == ["SealedProcessGroup"]
        bad += not sealed or found.difference != 0.0
        verdict = "yes" if sealed else ", ".join(found.groups)
        table.add_row(name, case.framework, found.version, verdict, f"{found.difference:g}")
    Console().print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
