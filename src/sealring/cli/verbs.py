"""The verbs of the command line. A verb's module is imported only when the verb is used, because
all of them together import about a thousand modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from sealring.cli.examples import EXAMPLES

VERBS: Final = (
    "demo",
    "run",
    "top",
    "doctor",
    "plan",
    "audit",
    "policy",
    "broker",
    "bench",
    "ca",
    "vault",
)
"""The verbs in the order of --help. Each is a module of this package."""


class VerbsOnDemand(TyperGroup):
    """The click group of `sealring`, whose commands are loaded on demand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Verbs()
        prepare_one(self, "")

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


class _Verbs(Mapping[str, Any]):
    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in VERBS:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = prepare(_command(name), name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _command(name: str) -> Any:
    """The `app` of the verb's module, if it has commands of its own; else the function `name`."""
    module: Any = import_module(f"sealring.cli.{name}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(name, context_settings=getattr(module, "PASS_ON", None))(getattr(module, name))
    command = typer.main.get_command(app)
    command.name = name
    return command


def prepare(command: Any, path: str) -> Any:
    """Applies `prepare_one` to a command and its subcommands. `path` is what the user types."""
    for name, below in getattr(command, "commands", {}).items():
        prepare(below, f"{path} {name}")
    return prepare_one(command, path)


def prepare_one(command: Any, path: str) -> Any:
    """Adds an example to a command's --help, and hides the type of flags there."""
    if (example := EXAMPLES.get(path)) is not None and "Example:" not in (command.help or ""):
        command.epilog = f"Example: {example}"
    own_parameters = command.get_params

    def parameters(context: Any) -> Any:
        # Done here, because the option --help is made only when it is first used.
        found = own_parameters(context)
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found

    command.get_params = parameters
    return command
