"""How the verbs print: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

console = Console()
errors = Console(stderr=True)
debug = False
"""Whether tracebacks are shown."""


def print_json(value: Any) -> None:
    """Prints JSON without colours and wrapping, so that any program can read it."""
    print(json.dumps(value))


def warn(text: str) -> None:
    """Prints one sentence on stderr."""
    errors.print(harmless(text), markup=False, highlight=False, soft_wrap=True)


def table(
    columns: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    right: Collection[str] = (),
    wrap: Collection[str] = (),
) -> Table:
    """A table without lines between the columns, so that it fits into 80 characters.

    `wrap` names columns whose cells continue in the next line if there is little room; cells of
    other columns are cut. `right` names columns of numbers.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold" if name in wrap else "ellipsis",
            no_wrap=name not in wrap,
            min_width=len(name),
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return made


def progress_bar(*columns: str) -> Progress:
    """A progress bar on stderr, so that it does not mix with the command's output."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        *(TextColumn(column) for column in columns),
        TimeRemainingColumn(),
        console=errors,
        expand=True,
        transient=True,
        disable=not errors.is_terminal,  # else it leaves an empty line in a log
    )


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


def number_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    caption: str | None = None,
    left: int = 1,
    narrow: bool = False,
) -> Table:
    """A table whose first `left` columns are names, which are not broken; the others are numbers.

    A `narrow` table has no lines between its columns, and breaks no cell.
    """
    layout: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    made = Table(title=title, caption=caption, **(layout if narrow else {}))
    for number, name in enumerate(columns):
        if number < left:
            made.add_column(name, no_wrap=True)
        else:
            made.add_column(name, justify="right", no_wrap=narrow)
    for row in rows:
        made.add_row(*map(str, row))
    return made


def counted(count: int, noun: str) -> str:
    """Returns e.g. "1 version" or "2 versions"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say(text: str) -> None:
    """Prints one sentence. It is not wrapped, so that long values can be copied."""
    console.print(harmless(text), markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Makes untrusted text safe for a terminal, in one line."""
    return harmless(" ".join(text.split()))


def harmless(text: str) -> str:
    """Makes untrusted text of several lines safe for a terminal, such as an error with a file
    name."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


@contextmanager
def keys() -> Iterator[Callable[[str, float], bool]]:
    """Yields a function that waits up to some seconds for a key, and says whether it was pressed.

    Keys are read one by one and not shown. Ctrl-C still interrupts. If standard input is not a
    terminal, nothing is read from it.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(key: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([terminal], [], [], left)[0]:
                continue
            typed = os.read(terminal, 1024)
            if not typed or key.encode() in typed:  # an empty read: the terminal is gone
                return True
        return False

    try:
        tty.setcbreak(terminal, termios.TCSANOW)  # keeps keys that were typed before
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(key: str, seconds: float) -> bool:
    time.sleep(seconds)
    return False
