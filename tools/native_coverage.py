"""Prints the lines of native/ that the C++ tests run, from gcov's data.

python tools/native_coverage.py BUILD_FOLDER
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measured(build: Path) -> dict[str, dict[int, bool]]:
    """For each source file and line, whether any test ran it. The tests' own files do not count."""
    gcov = shutil.which("gcov")
    if gcov is None:
        raise SystemExit("gcov is missing: it comes with GCC")
    lines: dict[str, dict[int, bool]] = defaultdict(dict)
    for data in sorted(build.rglob("*.gcda")):
        done = subprocess.run(
            [gcov, "--json-format", "--stdout", data], cwd=ROOT, capture_output=True, check=True
        )
        for document in map(json.loads, done.stdout.splitlines()):
            # Paths are relative to the compiler's working folder or to the root (CMakeLists.txt).
            folders = (Path(document["current_working_directory"]), ROOT)
            for file in document["files"]:
                paths = [(folder / file["file"]).resolve() for folder in folders]
                path = next((one for one in paths if one.exists()), ROOT.parent)
                if not path.is_relative_to(ROOT) or {"tests", "fuzz"} & set(path.parts):
                    continue
                found = lines[str(path.relative_to(ROOT))]
                for line in file["lines"]:
                    number = line["line_number"]
                    found[number] = found.get(number, False) or line["count"] > 0
    return lines


def main() -> None:
    lines = measured(Path(sys.argv[1]))
    if not lines:
        raise SystemExit(f"{sys.argv[1]} holds no data of gcov: build with --coverage, run ctest")
    width = max(map(len, lines))
    print(f"{'C++':{width}}  lines  covered")
    for name, found in sorted(lines.items()):
        share = sum(found.values()) / len(found)
        print(f"{name:{width}}  {len(found):5}  {share:7.0%}")
    total, run = sum(map(len, lines.values())), sum(sum(one.values()) for one in lines.values())
    print(f"{'all':{width}}  {total:5}  {run / total:7.0%}")


if __name__ == "__main__":
    main()
