"""The one file that says which cases do not count, and why; and how a run is held against it.

A run is in order when every case passed, or skipped itself for the reason that the file has, or is
in the file among those that cannot apply, and still fails. Anything else is a complaint.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.outcome import Outcome

FILE = Path(__file__).with_name("not_applicable.toml")


@dataclass(frozen=True, slots=True)
class Listed:
    torch: str = ""
    """The release whose suite the file describes in full; others have a few cases more or fewer."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Case -> torch's own words."""
    cannot_apply: Mapping[str, str] = field(default_factory=dict)
    """Case that Gloo passes -> why it has no meaning here."""


def read(path: Path = FILE) -> Listed:
    content = tomllib.loads(path.read_text())
    skips: dict[str, str] = {}
    cannot_apply: dict[str, str] = {}
    for entry in content.get("skips_itself", []):
        _add(skips, entry["cases"], entry["torch_says"], path)
    for entry in content.get("cannot_apply", []):
        _add(cannot_apply, entry["cases"], entry["why"], path)
    if twice := skips.keys() & cannot_apply.keys():
        raise ValueError(f"{path.name} has {', '.join(sorted(twice))} in both lists")
    return Listed(content["torch"], skips, cannot_apply)


def _add(into: dict[str, str], cases: Iterable[str], reason: str, path: Path) -> None:
    for case in cases:
        if case in into:
            raise ValueError(f"{path.name} lists {case} twice")
        into[case] = reason


@dataclass(frozen=True, slots=True)
class Judgement:
    passed: list[str]
    failed: list[str]
    skipped: list[str]
    """Skipped themselves, or are listed as not applicable and failed as expected."""
    complaints: list[str]


def judge(
    sealring: Mapping[str, Outcome],
    gloo: Mapping[str, Outcome],
    listed: Listed,
    *,
    whole_suite_of: str | None,
) -> Judgement:
    """`whole_suite_of` is the torch release if every case was run: then the file must fit it."""
    verdicts: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    complaints: list[str] = []
    for case, outcome in sealring.items():
        verdict = outcome.verdict
        base = gloo[case].verdict if case in gloo else "not run"
        if case in listed.cannot_apply:
            if verdict == "failed":
                verdict = "skipped"
            else:
                complaints.append(f"{case} {verdict}, but is listed as one that cannot apply")
        elif verdict == "failed":
            complaints.append(f"{case} failed ({base} on Gloo): {outcome.reason}")
        elif verdict == "skipped":
            if case not in listed.skips:
                complaints.append(f"{case} skipped itself and is not listed: {outcome.reason}")
            elif listed.skips[case] != outcome.reason:
                complaints.append(
                    f"{case} skipped itself because {outcome.reason!r}, "
                    f"and is listed with {listed.skips[case]!r}"
                )
            if base == "passed":
                complaints.append(f"{case} skipped itself and passed on Gloo")
        elif case in listed.skips:
            complaints.append(f"{case} passed, but is listed as one that skips itself")
        verdicts[verdict].append(case)
    if missing := gloo.keys() - sealring.keys():
        complaints.append(f"only run on Gloo: {', '.join(sorted(missing))}")
    if whole_suite_of == listed.torch:
        for case in sorted((listed.skips.keys() | listed.cannot_apply.keys()) - sealring.keys()):
            complaints.append(f"{case} is listed, and torch {listed.torch} has no such case")
    return Judgement(**verdicts, complaints=complaints)


def unproven(sealring: Mapping[str, Outcome]) -> list[str]:
    """Complaints about a run that cannot show that it was sealring that was tested."""
    passed = [outcome for outcome in sealring.values() if outcome.verdict == "passed"]
    wrong = [o.case for o in passed if o.evidence.ranks != o.world]
    complaints = [f"{case} passed without a sealed default group on every rank" for case in wrong]
    if passed and not any(outcome.evidence.sealed_records for outcome in passed):
        complaints.append("no record was sealed in the whole run")
    return complaints
