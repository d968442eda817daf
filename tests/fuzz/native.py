"""Runs the native fuzz targets side by side, and prints what they executed and covered.

    python -m tests.fuzz.native --seconds 60          every target for so long
    python -m tests.fuzz.native --only link,mailbox

The targets (native/fuzz/fuzz_*.cpp) must have been built: `make fuzz-native` does both. libFuzzer
starts from native/fuzz/corpus and keeps what it finds in build/fuzz-native/corpus; an input that
makes a target fail goes to build/fuzz-native/finds, and the command then fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "fuzz-native"
KEPT: Final = ROOT / "native" / "fuzz" / "corpus"

_PROGRESS: Final = re.compile(r"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
_LONGEST_INPUT: Final = 2600
# Leaks are checked only at the end, because a check after each input takes most of the time.
_SANITIZERS: Final = {"ASAN_OPTIONS": "malloc_context_size=3:quarantine_size_mb=16"}


@dataclass
class Outcome:
    target: str
    executions: int = 0
    per_second: float = 0.0
    edges: int = 0
    features: int = 0
    corpus: int = 0
    finds: int = 0
    ended: bool = False


class Run:
    """One target that runs under libFuzzer."""

    def __init__(self, target: str, seconds: float) -> None:
        self.outcome = Outcome(target)
        self._began = time.monotonic()
        self._log = BUILD / f"{target}.log"
        own = BUILD / "corpus" / target
        own.mkdir(parents=True, exist_ok=True)
        (BUILD / "finds").mkdir(exist_ok=True)
        kept = KEPT / target
        command = [
            str(BUILD / f"fuzz_{target}"),
            f"-max_total_time={seconds:.0f}",
            f"-max_len={_LONGEST_INPUT}",
            "-detect_leaks=0",
            "-timeout=20",
            "-report_slow_units=1000",
            f"-artifact_prefix={BUILD}/finds/{target}-",
            str(own),
            *([str(kept)] if kept.is_dir() else []),
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **_SANITIZERS}
            )

    def look(self) -> None:
        """Reads what libFuzzer has written so far."""
        seen = _PROGRESS.findall(self._log.read_text(errors="replace"))
        outcome = self.outcome
        if seen:
            outcome.executions, outcome.edges, outcome.features, outcome.corpus = map(int, seen[-1])
        if outcome.ended:
            return
        outcome.per_second = outcome.executions / max(time.monotonic() - self._began, 1e-9)
        if self.process.poll() is not None:
            outcome.ended = True
            outcome.finds = int(self.process.returncode != 0)


def targets() -> list[str]:
    return sorted(
        path.stem.removeprefix("fuzz_") for path in (ROOT / "native/fuzz").glob("fuzz_*.cpp")
    )


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table(title="native fuzzing")
    table.add_column("target")
    for column in ("executions", "per second", "edges", "features", "corpus", "finds"):
        table.add_column(column, justify="right")
    for each in outcomes:
        table.add_row(
            each.target,
            f"{each.executions:,}",
            f"{each.per_second:,.0f}",
            str(each.edges),
            str(each.features),
            str(each.corpus),
            str(each.finds) if each.ended else "...",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(each.executions for each in outcomes):,}",
        *[""] * 4,
        str(sum(each.finds for each in outcomes)),
    )
    return table


def run_all(names: list[str], seconds: float, jobs: int) -> Iterator[list[Outcome]]:
    """Yields the outcomes again and again until all runs have ended."""
    runs: list[Run] = []
    while len(runs) < len(names) or any(not run.outcome.ended for run in runs):
        while len(runs) < len(names) and sum(not run.outcome.ended for run in runs) < jobs:
            runs.append(Run(names[len(runs)], seconds))
        time.sleep(0.5)
        for run in runs:
            run.look()
        yield [run.outcome for run in runs]


def line_coverage(names: list[str]) -> str | None:
    """Returns llvm-cov's table of the native files over all inputs, or None without that build."""
    build = ROOT / "build" / "fuzz-native-coverage"
    tools = [
        shutil.which(tool) or shutil.which(f"{tool}-14") for tool in ("llvm-profdata", "llvm-cov")
    ]
    if not build.is_dir() or not all(tools):
        return None
    profdata, cov = (str(tool) for tool in tools)
    profiles, binaries = [], []
    for name in names:
        profile = build / f"{name}.profraw"
        folders = [str(path) for path in (BUILD / "corpus" / name, KEPT / name) if path.is_dir()]
        subprocess.run(
            [str(build / f"fuzz_{name}"), "-runs=0", "-detect_leaks=0", *folders],
            env={**os.environ, "LLVM_PROFILE_FILE": str(profile)},
            check=True,
            capture_output=True,
        )
        profiles.append(str(profile))
        binaries += ["-object", str(build / f"fuzz_{name}")]
    merged = build / "all.profdata"
    subprocess.run([profdata, "merge", "-sparse", *profiles, "-o", str(merged)], check=True)
    report = subprocess.run(
        [
            cov,
            "report",
            *binaries[1:],
            f"-instr-profile={merged}",
            "-show-branch-summary=false",
            "-ignore-filename-regex=(fuzz|tests|/usr)/",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return report.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else targets()
    if unknown := sorted(set(names) - set(targets())):
        parser.error(f"there is no target {', '.join(unknown)}; there are {', '.join(targets())}")
    console = Console(stderr=options.json)
    outcomes: list[Outcome] = []
    with Live(console=console, auto_refresh=False) as live:
        for outcomes in run_all(names, options.seconds, options.jobs):
            live.update(table_of(outcomes), refresh=True)
    if (coverage := line_coverage(names)) is not None:
        console.print(coverage, markup=False, highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps({"targets": [asdict(each) for each in outcomes]}))
    failed = [each.target for each in outcomes if each.finds]
    for name in failed:
        console.print(f"{name} failed: see {BUILD}/{name}.log, and {BUILD}/finds for its input")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
