"""The texts of the commands: their help, and one sentence if something is wrong."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from sealring import cli
from sealring.cli import app, bench, terminal
from sealring.cli.verbs import EXAMPLES
from tests.cli.test_commands import sealring


def commands(command: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    command = command if command is not None else typer.main.get_command(app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}".strip())


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == dict(commands()).keys()


def test_a_command_accepts_the_example_that_its_help_shows() -> None:
    known = dict(commands())
    for path, example in EXAMPLES.items():
        assert f"Example: {example}" in (known[path].epilog or ""), path
        words = shlex.split(example)
        assert words[0] == "sealring"
        assert example.startswith(f"sealring {path}".strip()), path
        rest, command = words[1:], known[""]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        command.make_context(path, rest)  # parses the words and calls nothing


@pytest.mark.parametrize("path", ["", "vault", "audit"])
def test_the_shell_completes_every_command(path: str) -> None:
    words = ["sealring", *path.split(), ""]
    completed = sealring(
        _SEALRING_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(words),
        COMP_CWORD=str(len(words) - 1),
    )
    assert set(completed.stdout.split()) == set(dict(commands())[path].commands)


def test_help_shows_no_type_beside_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for path, command in commands():
        with pytest.raises(SystemExit):
            command(["--help"], prog_name=f"sealring {path}")
        shown = capsys.readouterr().out
        assert "--help" in shown
        assert "<bool>" not in shown, path
        assert "Example: sealring" in shown, path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothere.py"], "there is no script nothere.py in "),
        (["--no-python", "nothere"], "there is no program nothere"),
    ],
)
def test_a_script_that_does_not_exist_is_one_sentence(options: list[str], words: str) -> None:
    done = sealring("run", "-n", "2", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"configuration: {words}")


@pytest.mark.parametrize("number", ["0", "abc", "-1"])
def test_a_number_of_workers_that_is_none_is_one_sentence(number: str) -> None:
    done = sealring("run", f"--nproc-per-node={number}", __file__)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        f"configuration: --nproc-per-node is {number!r}; pass a number from 1, or auto, gpu, cpu"
    )


def fail(*_: Any) -> None:
    raise RuntimeError("boom")


def test_an_unknown_error_is_one_sentence_and_a_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sealring", "bench", "report", "x.json"])
    monkeypatch.setattr(bench, "read_results", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "RuntimeError: boom",
        "sealring does not know this error: `sealring --debug` shows where it is.",
    ]
    monkeypatch.setattr(terminal, "debug", False)  # monkeypatch restores it at the end
    monkeypatch.setattr(sys, "argv", ["sealring", "--debug", "bench", "report", "x.json"])
    with pytest.raises(RuntimeError, match="boom"):
        cli.main()
