"""Writes docs/errors.md from src/sealring/errors.py.

python tools/errors_page.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sealring.errors import SealringError, every_class

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
INTRODUCTION: Final = """\
# Errors

<!-- written by tools/errors_page.py -->

All errors are subclasses of `sealring.errors.SealringError`, a `RuntimeError`. A class is what a
script may want to catch. `error.code` says exactly what happened, in a spelling that stays:
commands, logs and `--json` print it. Below, a class and its code come first, then its further
codes. In brackets is whose fault it is (`error.fault`), where that is known; a code without one has
its class's. "Yours" is who set the worker up.

[failures.md](failures.md) says which event leads to which error, and when. Errors arrive in
`backward()` too, in the place of DDP's own RuntimeError.
"""


def rows(kind: type[SealringError]) -> Iterator[str]:
    for each in every_class(kind):
        parent = each.__base__.__name__ if each.__base__ else ""
        under = f", a {parent}" if each is not kind and each.__base__ is not kind else ""
        said = " ".join((inspect.getdoc(each) or "").split())
        yield f"- **`{each.__name__}`**{under}, `{each.code}`{_whose(each.fault)}: {said}"
        if "codes" in vars(each):
            for code, meaning in each.codes.items():
                fault = each.faults.get(code, each.fault)
                yield f"  - `{code}`{_whose(fault, each.fault)}: {meaning}"


def _whose(fault: str, of_the_class: str = "") -> str:
    if fault == of_the_class:
        return ""
    return f" ({fault or 'not known'})"


def chapter(title: str, kinds: list[type[SealringError]]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    for kind in kinds:
        yield from rows(kind)


def page() -> str:
    families = [kind for kind in SealringError.__subclasses__() if kind.__subclasses__()]
    single = [kind for kind in SealringError.__subclasses__() if kind not in families]
    lines = INTRODUCTION.splitlines()
    for kind in families:
        lines += chapter(kind.__name__, [kind])
    return "\n".join([*lines, *chapter("Others", single), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
