"""Finds phrases that CONTRIBUTING.md rules out, and prints where they are and what to write.

python tools/words.py [PATHS]         without paths: all files that git tracks in FOLDERS
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = (
    "src",
    "native",
    "tests",
    "docs",
    "model",
    "examples",
    "tools",
    "deploy",
    ".ci",
    ".github",
)
DATA: Final = ("tests/fuzz/corpus/", "native/fuzz/corpus/", "docs/results/")
HERE: Final = ("tools/words.py", "CONTRIBUTING.md")
"""What has to name the phrases."""

PHRASES: Final = {
    r"who(so)?ever": "say who: the caller, the peer, the receiving rank, an attacker",
    r"nobody": "say who does not: no rank, no other process, no user",
    r"(to|can|cannot|could|not|may) be had": "is available, is not available",
    r"is had": "exists, is available",
    r"(has|have|had) it not": "does not have it",
    r"(it|this|that|call|collective|group|message|time|traffic|work|step) is over": "has ended",
    r"(minutes|seconds|steps) are over": "have passed, have ended",
    r"(?-i:[Hh](?:e|im|is|imself))": "the attacker, the caller, it",
    r"in vain": "without success",
    r"at leisure": "offline, at any time",
    r"by (its|their|his) own word": "as it states",
    r"comes? of it": "the result, the outcome",
    r"no business": "does not use",
    r"in the midst": "during",
    r"lies? ready": "is there, is prepared",
    r"(its|their) kin": "its variants",
    r"not to be": "must not be, is not",
    r"hire[sd]?": "enable, launch",
}


def files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, "*.md", "Makefile", "CMakeLists.txt", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if not name.startswith(DATA) and name not in HERE:
            yield ROOT / name


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase, and what to write: in names too, and where a line break is inside."""
    for pattern, instead in PHRASES.items():
        spaced = pattern.replace(" ", r"[\s#*/_]+")
        for found in re.finditer(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def main(paths: list[str]) -> int:
    count = 0
    for path in [Path(one).resolve() for one in paths] or files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # not text, or deleted and not committed
            continue
        for line, phrase, instead in sorted(findings(text)):
            count += 1
            print(f"{path.relative_to(ROOT)}:{line}: {phrase!r}; write: {instead}")
    if count:
        print(f"{count} phrases that are hard to read: see CONTRIBUTING.md, Plain English")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
