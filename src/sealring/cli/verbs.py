"""The verbs of the command line. A verb's module is imported only when the verb is used, because
all of them together import about a thousand modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

EXAMPLES: Final = {
    "": "sealring run -n 4 train.py",
    "demo": "sealring demo",
    "run": "sealring run -n 4 train.py --learning-rate 0.1",
    "top": "sealring top --job train",
    "top metrics": "sealring top metrics --listen 127.0.0.1:9464",
    "top trace": "sealring top trace traces --number 1042",
    "doctor": "sealring doctor --watch 4711",
    "plan": "sealring plan gpt2-xl --ranks 2..64",
    "audit": "sealring audit check run --authority ca.pem --policy log.policy",
    "audit check": "sealring audit check run --authority ca.pem --policy log.policy "
    "--claims claims.toml",
    "audit papers": "sealring audit papers run model.safetensors --authority authority.pem "
    "--owner-key owner --model-key model.key -o papers",
    "audit init": "sealring audit init runs --log example.com/runs",
    "audit append": "sealring audit append runs report.json weights.sha256",
    "audit proof": "sealring audit proof runs 0 --policy VKEY -o report.tlog-proof",
    "audit verify": "sealring audit verify statement.json --authority sealring-ca/authority.pem",
    "audit policy": "sealring audit policy runs.policy --log VKEY --witness W1,https://w1.example",
    "audit witness": "sealring audit witness --key w1.key --logs logs.policy --listen 0.0.0.0:8446",
    "audit log": "sealring audit log runs --policy VKEY --seen checkpoint.last-week",
    "policy": "sealring policy check policy.toml evidence.json",
    "policy new": "sealring policy new --evidence evidence.json",
    "policy attest": "sealring policy attest --out evidence.json",
    "policy check": "sealring policy check policy.toml evidence.json",
    "broker": "sealring broker --policy policy.toml --ca sealring-ca",
    "broker revoke": "sealring broker revoke --job train --rank 3",
    "broker release": "sealring broker release --job train",
    "broker audit": "sealring broker audit --json",
    "vault rm": "sealring vault rm my-vault data",
    "bench": "sealring bench all --quick",
    "bench allreduce": "sealring bench allreduce --json",
    "bench step": "sealring bench step --trace step.json",
    "bench all": "sealring bench all --quick",
    "bench report": "sealring bench report results.json -o report.html",
    "bench vault": "sealring bench vault --json",
    "ca": "sealring ca init",
    "ca init": "sealring ca init sealring-ca",
    "ca request": "sealring ca request --job train --rank 0-7",
    "ca issue": "sealring ca issue --job train --rank 0-7",
    "ca show": "sealring ca show train-rank-0.pem",
    "vault ingest": "sealring vault ingest my-vault corpus --name corpus",
    "vault build": "sealring vault build my-vault pipeline.py",
    "vault": "sealring vault seal my-vault data",
    "vault init": "sealring vault init my-vault --key my.key",
    "vault identity": "sealring vault identity alice.identity",
    "vault seal": "sealring vault seal my-vault data --key my.key",
    "vault open": "sealring vault open my-vault data --out data.opened",
    "vault ls": "sealring vault ls my-vault --json",
    "vault verify": "sealring vault verify my-vault",
    "vault grant": "sealring vault grant my-vault --name alice --to-person alice.public",
    "vault revoke": "sealring vault revoke my-vault alice",
    "vault rotate": "sealring vault rotate my-vault",
}
"""An example of every command, which its --help shows."""


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
