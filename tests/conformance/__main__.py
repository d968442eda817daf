"""make conformance: torch's own backend tests, on Gloo and on sealring.

python -m tests.conformance [-k TEXT] [--backend gloo] [--subset] [--json]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.conformance import baseline, listed
from tests.conformance.outcome import Outcome
from tests.conformance.run import Choose, run_backend
from tests.conformance.subset import SUBSET

out = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, highlight=False)


def main(
    k: Annotated[
        list[str] | None, typer.Option("-k", help="only cases whose name has this")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="sealring, or gloo to make the baseline alone")
    ] = "sealring",
    subset: Annotated[bool, typer.Option(help="only the cases that CI runs")] = False,
    fresh: Annotated[
        bool, typer.Option(help="run Gloo again even where its outcome is known")
    ] = False,
    jobs: Annotated[int, typer.Option(help="worlds at a time")] = max(
        1, (os.cpu_count() or 1) // 2
    ),
    timeout: Annotated[float, typer.Option(help="seconds after which a case counts as hung")] = 180,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the outcomes for a program")
    ] = False,
) -> None:
    """Runs torch's distributed tests and compares sealring's outcomes with Gloo's."""

    def choose(cases: list[str]) -> list[str]:
        chosen = [case for case in cases if not subset or case in SUBSET]
        return [case for case in chosen if not k or any(text in case for text in k)]

    gloo = baseline.kept()
    known = frozenset() if fresh or backend == "gloo" else frozenset(gloo)
    if backend not in ("sealring", "gloo"):
        raise typer.BadParameter("--backend is sealring or gloo")
    measured = _run(
        "gloo", lambda cases: [c for c in choose(cases) if c not in known], jobs, timeout
    )
    gloo |= measured
    baseline.keep(gloo)
    if backend == "gloo":
        outcomes = measured
        judgement = listed.Judgement(
            *(
                [case for case, outcome in outcomes.items() if outcome.verdict == verdict]
                for verdict in ("passed", "failed", "skipped")
            ),
            complaints=[],
        )
    else:
        outcomes = _run("sealring", choose, jobs, timeout)
        judgement = listed.judge(
            outcomes,
            {case: outcome for case, outcome in gloo.items() if case in outcomes},
            listed.read(),
            whole_suite_of=None if k or subset else torch.__version__.partition("+")[0],
        )
        judgement.complaints.extend(listed.unproven(outcomes))
    if not outcomes:
        judgement.complaints.append("no case was run")
    if as_json:
        print(json.dumps(_report(backend, outcomes, gloo, judgement)))
    else:
        _print(backend, outcomes, gloo, judgement)
    sys.exit(1 if judgement.complaints or judgement.failed else 0)


def _run(backend: str, choose: Choose, jobs: int, timeout: float) -> dict[str, Outcome]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[counts]}"),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(backend, total=None, counts="loading torch's suite")
        counts = {"passed": 0, "failed": 0, "skipped": 0}

        def chosen(cases: list[str]) -> list[str]:
            wanted = choose(cases)
            progress.update(task, total=len(wanted))
            return wanted

        def report(outcome: Outcome) -> None:
            counts[outcome.verdict] += 1
            text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            progress.update(task, advance=1, counts=f"{text}; {outcome.case}")
            if outcome.verdict == "failed":
                errors.print(f"{backend}: {outcome.case} failed: {outcome.reason}", markup=False)

        return run_backend(backend, chosen, report, jobs=jobs, limit_s=timeout)


def _report(
    backend: str,
    outcomes: dict[str, Outcome],
    gloo: dict[str, Outcome],
    judgement: listed.Judgement,
) -> dict[str, object]:
    return {
        "backend": backend,
        "torch": torch.__version__,
        "passed": len(judgement.passed),
        "failed": len(judgement.failed),
        "skipped": len(judgement.skipped),
        "complaints": judgement.complaints,
        "cases": [
            {**o.as_json(), "gloo": gloo[case].verdict if case in gloo else None}
            for case, o in outcomes.items()
        ],
    }


def _print(
    backend: str,
    outcomes: dict[str, Outcome],
    gloo: dict[str, Outcome],
    judgement: listed.Judgement,
) -> None:
    for case in judgement.failed:
        outcome = outcomes[case]
        out.rule(f"{case} ({outcome.world} ranks, {outcome.seconds:.1f} s)", align="left")
        out.print(outcome.reason, markup=False)
        for rank, text in outcome.output.items():
            out.print(f"--- rank {rank}\n{text}", markup=False)
    for complaint in judgement.complaints:
        out.print(f"! {complaint}", markup=False)
    if backend == "sealring":
        done = [outcome for outcome in outcomes.values() if outcome.verdict == "passed"]
        out.print(
            f"sealed {sum(o.evidence.sealed_records for o in done):,} records, "
            f"{sum(o.evidence.sealed_bytes for o in done):,} bytes; "
            f"{sum(bool(o.evidence.gloo_groups) for o in done)} cases also ask for Gloo by name"
        )
        passing = [case for case in outcomes if case in gloo and gloo[case].verdict == "passed"]
        out.print(f"Gloo passes {len(passing)} of these cases on this machine")
    out.print(
        f"{len(judgement.passed)} passed, {len(judgement.failed)} failed, "
        f"{len(judgement.skipped)} skipped"
    )


if __name__ == "__main__":
    typer.run(main)
