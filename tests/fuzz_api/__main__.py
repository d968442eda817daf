"""python -m tests.fuzz_api --seconds 60 --seed 7"""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer
from rich.table import Table

from sealring.cli.terminal import console, errors, print_json, progress_bar
from tests.fuzz_api.plan import OPERATIONS
from tests.fuzz_api.run import Result, fuzz


def main(
    seconds: Annotated[float, typer.Option(help="how long")] = 60.0,
    seed: Annotated[int | None, typer.Option(help="of all cases; random if unset")] = None,
    case: Annotated[int | None, typer.Option(help="run this case only")] = None,
    world: Annotated[int, typer.Option(help="how many ranks", min=1)] = 3,
    patience: Annotated[float, typer.Option(help="seconds after which a case hangs")] = 240.0,
    json: Annotated[bool, typer.Option("--json", help="counts as JSON")] = False,
) -> None:
    """Random calls on sealring and on Gloo: no crash, hang, leak or difference."""
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    if not json:
        console.print(f"fuzz-api with seed {chosen}")
    with progress_bar("{task.fields[counts]}") as bar:
        task = bar.add_task("fuzz-api", total=seconds, counts="")
        shown = 0

        def on_case(result: Result) -> None:
            nonlocal shown
            calls = sum(result.counts[operation] for operation in OPERATIONS)
            text = f"{result.cases} cases, {calls} calls, {len(result.findings)} findings"
            bar.update(task, completed=result.seconds, counts=text)
            for finding in result.findings[shown:]:
                where = "" if finding.rank is None else f" on rank {finding.rank}"
                errors.print(
                    f"{finding.kind} in case {finding.case}{where}: {finding.what}\n"
                    f"    {result.again(finding)}",
                    markup=False,
                    soft_wrap=True,
                )
            shown = len(result.findings)

        result = fuzz(chosen, world, seconds, case, patience, on_case)
    if json:
        print_json(result.as_json())
    else:
        _show(result)
    sys.exit(1 if result.findings else 0)


def _show(result: Result) -> None:
    table = Table(box=None, show_header=False)
    calls = {name: result.counts[name] for name in OPERATIONS if result.counts[name]}
    endings = {n[5:]: count for n, count in result.counts.items() if n.startswith("end: ")}
    rows = {
        "cases": f"{result.cases} in {result.seconds:.0f} s, {result.world} ranks",
        "calls by ranks": f"{sum(calls.values())}: {_listed(calls)}",
        "equal to Gloo's": str(result.counts["equal"]),
        "both refuse": str(result.counts["both refuse"]),
        "only sealring can": str(result.counts["only sealring can"]),
        "groups ended by": _listed(endings),
        "findings": str(len(result.findings)),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _listed(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count}" for name, count in ordered)


if __name__ == "__main__":
    typer.run(main)
