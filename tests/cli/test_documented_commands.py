"""Commands in the documents and in the commands' own examples use only options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sealring.cli import app
from sealring.cli.verbs import EXAMPLES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    for block in _FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for one in re.split(r"&&|\||;|>", line):
                found = re.match(r"\s*(?:\w+=\S+ +)*(sealring [a-z].*)", one.partition(" #")[0])
                if found:
                    yield found[1].strip()


def unknown(line: str) -> list[str]:
    """Returns the words of a command line that the program does not accept."""
    words = line.split()[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        if words[0] not in command.commands:
            break
        command = command.commands[words.pop(0)]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    own_words = words[: words.index("--")] if "--" in words else words
    if command.name == "run":  # words after the script belong to the script
        begins = [at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")]
        own_words = words[: begins[0]] if begins else words
    given = {word.partition("=")[0] for word in own_words if re.match(r"--?[a-z]", word)}
    return sorted(given - options - {"--help"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_commands_of_a_page(page: Path) -> None:
    wrong = {line: found for line in commands(page.read_text()) if (found := unknown(line))}
    assert wrong == {}


def test_commands_of_the_examples() -> None:
    wrong = {line: found for line in EXAMPLES.values() if (found := unknown(line))}
    assert wrong == {}


def test_an_option_that_does_not_exist_is_seen() -> None:
    assert unknown("sealring audit check run --no-such 1 -- --vault x") == ["--no-such"]
    assert len(list(commands((ROOT / "docs" / "logs.md").read_text()))) > 10


def leaves(
    command: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command that does something, in the words that a user types."""
    command = command if command is not None else typer.main.get_command(app)
    below = getattr(command, "commands", {})
    if path and (not below or command.invoke_without_command):
        yield path, command
    for name, one in below.items():
        yield from leaves(one, (*path, name))


def test_the_table_of_commands_has_every_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    listed: set[tuple[str, ...]] = set()
    for cell in re.findall(r"^\| (`sealring [^|]*) \|", page, re.MULTILINE):
        # In `sealring audit log`, `verify`, the later words belong to the first one's verb.
        first, *others = (re.sub(r" [^a-z].*| RUN.*", "", one) for one in cell.split("`")[1::2])
        words = tuple(first.split()[1:])
        listed |= {words[:1], words[:2], *((words[0], *one.split()[-1:]) for one in others)}
    missing = {path for path, _ in leaves()} - listed
    assert missing == set()


def test_the_page_says_what_prints_json() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    (sentence,) = re.findall(r"These print JSON with `--json`: (.*?)\.\n", page, re.DOTALL)
    named = {re.sub(r" --.*", "", one) for one in re.findall(r"`([^`]*)`", sentence)}
    without = {"bench all", "bench report", "top metrics"}  # the sentence names these as exceptions
    for path, command in leaves():
        typed = " ".join(path)
        listed = typed not in without and bool({typed, path[0]} & named)
        assert listed == any("--json" in one.opts for one in command.params), typed
