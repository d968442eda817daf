"""`make integrations`: a table of the frameworks that were run, and whether they were sealed."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.integrations.frameworks import FRAMEWORKS, Comparison, compare, version_of


def main() -> int:
    table = Table("script", "framework", "version", "sealed", "largest difference to Gloo")
    bad = 0
    for script, framework in track(FRAMEWORKS.items(), "Running", console=Console(stderr=True)):
        if version_of(framework) is None:
            table.add_row(script, framework, "", "not installed", "")
            continue
        found: Comparison = compare(script)
        sealed = found.groups == ["SealedProcessGroup"]
        bad += not sealed or found.difference != 0.0
        verdict = "yes" if sealed else ", ".join(found.groups)
        table.add_row(script, framework, found.version, verdict, f"{found.difference:g}")
    Console().print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
