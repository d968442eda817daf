"""Runs tests/torch_versions/checks.py with every torch that the package allows, and newer ones.

    python tools/torch_versions.py [--version 2.15 ...] [--wheel WHEEL] [--keep] [--json]

sealring is compiled once, or taken from WHEEL. Each torch gets a virtual environment in
build/torch-versions/VERSION. It is removed after its checks unless --keep is given, because a CUDA
build of torch takes gigabytes. (These builds also run without a GPU.) Prints a table; the exit
status is 1 if a check failed with a torch that the package's bound allows. pip's settings
(PIP_INDEX_URL, PIP_CONSTRAINT) choose the builds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / "build" / "torch-versions"
CHECKS: Final = ROOT / "tests" / "torch_versions" / "checks.py"
REPLICAS: Final = ROOT / "tests" / "train" / "integrations" / "scripts" / "replicas.py"
TORCHFT: Final = ("torchft", "torchft-nightly")
LIMIT_S: Final = 1200
"""The time limit of one run of all checks, much longer than they take on two busy cores."""


@dataclass
class Outcome:
    status: str
    """"ok", "failed" or "not available"."""
    text: str = ""

    def __str__(self) -> str:
        return self.status if self.status == "ok" else f"{self.status}: {self.text}"


@dataclass
class Tested:
    torch: str
    allowed: bool
    """Whether the package's bound allows this torch."""
    checks: dict[str, Outcome] = field(default_factory=dict)
    size_gb: float = 0.0
    """The size of the environment on disk."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(outcome.status != "failed" for outcome in self.checks.values())


def requirements() -> tuple[Requirement, list[str]]:
    """The package's bound for torch, and its other requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(each) for each in project["dependencies"]]
    (torch,) = [each for each in needed if each.name == "torch"]
    return torch, [str(each) for each in needed if each.name != "torch"]


def pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
    )


def newest_of_each_minor() -> list[str]:
    """The newest patch version of each minor version of torch, from the oldest allowed one."""
    listed = pip(sys.executable, "index", "versions", "torch").stdout
    found = re.search(r"Available versions: (.*)", listed)
    if found is None:
        raise SystemExit("pip finds no torch for this machine")
    (oldest,) = [
        Version(each.version) for each in requirements()[0].specifier if each.operator == ">="
    ]
    newest: dict[tuple[int, int], Version] = {}
    for version in sorted(Version(each.strip()).public for each in found[1].split(",")):
        each = Version(version)
        if each >= oldest and not each.is_prerelease:
            minor = (each.major, each.minor)
            newest[minor] = max(each, newest.get(minor, each))
    return [str(newest[minor]) for minor in sorted(newest)]


def built_wheel() -> Path:
    """Builds the checkout's wheel. Only files that changed since the last time are compiled."""
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    openssl = (ROOT / "build" / "libcrypto" / "prefix").read_text().strip()
    done = pip(
        sys.executable, "wheel", "--no-deps", "--no-build-isolation",
        f"--config-settings=build-dir={WORK / 'module'}",
        f"--config-settings=cmake.define.SEALRING_STATIC_OPENSSL={openssl}",
        "--wheel-dir", str(folder), str(ROOT),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, torch: str, wheel: Path) -> str:
    """Returns '' on success, else the last line of pip's output."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    _bound, others = requirements()
    # The wheel is installed without its requirements, so that a newer torch can be tried.
    for wanted in ([f"torch=={torch}", *others], ["--no-deps", str(wheel)]):
        done = pip(python, "install", "--quiet", "--no-cache-dir", *wanted)
        if done.returncode:
            return last_line(done.stderr)
    return ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_checks(python: Path) -> dict[str, Outcome]:
    """Runs all checks. One that ends or hangs its processes fails, and the rest run without it."""
    listed = subprocess.run(
        [str(python), "-c", "from checks import CHECKS; print(*CHECKS, sep='\\n')"],
        cwd=CHECKS.parent, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        return {"import": Outcome("failed", last_line(listed.stderr))}
    left, outcomes = listed.stdout.splitlines(), {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            output = launch(python, folder, left)
            for check in list(left):
                ranks = [
                    json.loads(each.read_text()) for each in Path(folder).glob(f"{check}.*.json")
                ]
                failed = [each for each in ranks if each["status"] == "failed"]
                if len(ranks) < 4 and not failed:
                    outcomes[check] = Outcome("failed", last_line(output))
                    left.remove(check)
                    break
                # PeerLost is only a consequence; another rank's error is the cause.
                failed.sort(key=lambda each: each["text"].startswith("PeerLost"))
                outcomes[check] = Outcome(**(failed or ranks)[0])
                left.remove(check)
    return outcomes


def launch(python: Path, results: str, checks: Sequence[str]) -> str:
    command = [
        str(python), "-m", "sealring.cli", "run", "-n", "4", str(CHECKS), results, *checks,
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if "SEALRING" not in name}
    try:
        done = subprocess.run(
            command, cwd=results, env={**environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s"
    return done.stdout


def run_torchft(python: Path, name: str) -> Outcome:
    """Trains with two replica groups, by a script like the example's."""
    installed = pip(
        python, "install", "--quiet", "--no-cache-dir", "--pre",
        "--only-binary", ",".join(TORCHFT), name,
    )  # fmt: skip
    if installed.returncode:
        return Outcome("not available", f"no wheel for {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "SEALRING_ONLY": "1"}
        environ["SEALRING_SECRET"] = os.urandom(32).hex()
        try:
            done = subprocess.run(
                [str(python), str(REPLICAS)], cwd=folder, env=environ, timeout=LIMIT_S,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome("failed", f"not done after {LIMIT_S} s")
        finally:
            pip(python, "uninstall", "--yes", "--quiet", name)
    return Outcome("failed", last_line(done.stderr)) if done.returncode else Outcome("ok")


def tested(torch: str, wheel: Path, keep: bool) -> Tested:
    bound, _ = requirements()
    result = Tested(torch, Version(torch) in bound.specifier)
    folder = WORK / torch
    begun = time.monotonic()
    try:
        if problem := make_environment(folder, torch, wheel):
            result.checks["install"] = Outcome("failed", problem)
            return result
        python = folder / "bin" / "python"
        files = [each.lstat().st_size for each in folder.rglob("*")]
        result.size_gb = round(sum(files) / 1e9, 1)
        result.checks = run_checks(python)
        for name in TORCHFT:
            result.checks[name] = run_torchft(python, name)
    finally:
        result.seconds = round(time.monotonic() - begun)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def table(results: Sequence[Tested]) -> str:
    """A Markdown table with a column for each torch."""
    checks = list(dict.fromkeys(check for each in results for check in each.checks))
    rows = [["", *(each.torch for each in results)], ["---"] * (len(results) + 1)]
    for check in checks:
        found = [each.checks.get(check, Outcome("not available", "")) for each in results]
        rows.append([check, *(str(outcome).replace("|", "/") for outcome in found)])
    rows.append(["size of the environment", *(f"{each.size_gb} GB" for each in results)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--version", action="append", default=[], metavar="X.Y[.Z]", help="only these"
    )
    parser.add_argument("--wheel", type=Path, help="tests this one, and compiles nothing")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    given = parser.parse_args()
    found = newest_of_each_minor()
    versions = [
        next((each for each in found if each == wanted or each.startswith(f"{wanted}.")), wanted)
        for wanted in given.version
    ] or found
    wheel = given.wheel.resolve() if given.wheel else built_wheel()
    results = []
    for version in versions:
        print(f"torch {version} ...", file=sys.stderr, flush=True)
        results.append(tested(version, wheel, given.keep))
        for check, outcome in results[-1].checks.items():
            print(f"  {check}: {outcome}", file=sys.stderr)
        print(f"  {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    results.sort(key=lambda each: Version(each.torch))
    if given.json:
        print(json.dumps([{**asdict(each), "passed": each.passed} for each in results], indent=1))
    else:
        print(f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}")
        print(table(results))
    return 0 if all(each.passed for each in results if each.allowed) else 1


if __name__ == "__main__":
    sys.exit(main())
