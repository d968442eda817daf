"""Runs the models: `make model`, or `python -m model.check [--quick]`.

1. Every scenario can reach its goal, so that the other searches are meaningful. 2. With all checks,
no scenario reaches a state that violates a property. 3. Without a check, the attack in the table
(model/table.py) is found. If the table says that another
   check covers for the missing one, no attack is found.

Prints the number of states of each search. The exit status is 1 if a result differs from the table.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from model.table import GOALS, MODELS, REMOVALS, Model

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Search:
    model: Model
    scenario: str
    removed: tuple[str, ...]
    condition: str
    """A condition on the state ST. It may set the variable QID."""
    what: str
    expected: str
    """The expected result: a flaw, "reached" or "none"."""


@dataclass(frozen=True)
class Found:
    search: Search
    flaw: str
    states: int

    @property
    def as_expected(self) -> bool:
        return self.flaw == self.search.expected

    def __str__(self) -> str:
        mark = "ok  " if self.as_expected else "FAIL"
        search = self.search
        text = f"{mark} {search.what:52} {search.scenario:16} {self.states:>7} states  {self.flaw}"
        if not self.as_expected:
            text += f" (expected: {search.expected})"
        return text


def searches(quick: bool) -> Iterator[Search]:
    violated = "Q:Qid := flaw(ST:State) /\\ Q:Qid =/= 'holds"
    for model in MODELS:
        for scenario, goal in GOALS[model].items():
            what = f"{model.name}: the scenario's goal can be reached"
            yield Search(model, scenario, (), goal, what, "reached")
        for scenario in model.scenarios:
            if not (quick and scenario in model.large):
                what = f"{model.name}: all checks"
                yield Search(model, scenario, (), violated, what, "none")
    for removal in REMOVALS:
        if not (quick and removal.scenario in removal.model.large):
            what = f"{removal.model.name}: without {' and '.join(removal.checks)}"
            # Without two checks there may be several flaws; the one in the table must be found.
            wanted = "" if removal.flaw == "none" else f" /\\ Q:Qid == '{removal.flaw}"
            yield Search(
                removal.model,
                removal.scenario,
                removal.checks,
                violated + wanted,
                what,
                removal.flaw,
            )


def run(model: Model, wanted: Sequence[Search]) -> list[Found]:
    """Runs the searches of one model in one Maude process."""
    lines = [f"load {FOLDER / model.file}"]
    for search in wanted:
        checks = " ; ".join(f"'{check}" for check in search.removed) or "all-on"
        state = f"{model.operator}('{search.scenario}, {checks})"
        lines.append(
            f"search [1] in {model.module} : {state} =>* ST:State such that {search.condition} ."
        )
    ran = subprocess.run(
        ["maude", "-no-banner", "-no-advise"],
        input="\n".join([*lines, "quit"]),
        capture_output=True,
        text=True,
        timeout=3600,
        check=True,
    )
    if "Warning" in ran.stdout + ran.stderr:
        raise SystemExit(
            f"Maude does not understand {model.file}:\n{ran.stdout}{ran.stderr}"[:4000]
        )
    blocks = ran.stdout.split("==========================================")[1:]
    if len(blocks) != len(wanted):
        raise SystemExit(f"Maude answered {len(blocks)} of {len(wanted)} searches of {model.file}")
    return [_read(search, block) for search, block in zip(wanted, blocks, strict=True)]


def _read(search: Search, block: str) -> Found:
    states = re.search(r"^states: (\d+)", block, re.MULTILINE)
    assert states is not None
    flaw = re.search(r"^Q:Qid --> '([\w-]+)", block, re.MULTILINE)
    ended = "none" if "No solution." in block else "reached"
    return Found(search, ended if flaw is None else flaw[1], int(states[1]))


def check(quick: bool = False) -> list[Found]:
    wanted = list(searches(quick))
    by_model = [[search for search in wanted if search.model is model] for model in MODELS]
    with ThreadPoolExecutor(len(MODELS)) as pool:
        found = pool.map(run, MODELS, by_model)
        return [each for outcomes in found for each in outcomes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="leave out the large scenarios")
    arguments = parser.parse_args()
    if shutil.which("maude") is None:
        print("maude is not installed: make system-deps", file=sys.stderr)
        return 2
    found = check(arguments.quick)
    for each in found:
        print(each)
    wrong = sum(not each.as_expected for each in found)
    states = sum(each.states for each in found)
    print(f"{len(found)} searches, {states} states, {wrong} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
