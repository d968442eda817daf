"""The verbs of the command line. A verb's module is imported when the verb is used: all of them
together import some thousand modules, and most commands need a tenth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from sealring.cli.help import prepare, prepare_one

VERBS: Final = (
    "demo",
    "run",
    "top",
    "metrics",
    "doctor",
    "attest",
    "plan",
    "audit",
    "papers",
    "policy",
    "broker",
    "bench",
    "ca",
    "trace",
    "log",
    "witness",
    "statement",
    "vault",
)
"""In the order of --help. Each is a module of this package."""


class VerbsOnDemand(TyperGroup):
    """What the Typer of `sealring` itself is made into."""

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
