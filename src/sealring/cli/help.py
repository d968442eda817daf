"""What --help shows beside the commands' own texts: an example of each, and no type of a flag."""

from __future__ import annotations

from typing import Any

from sealring.cli.examples import EXAMPLES


def prepare(command: Any, path: str) -> Any:
    """The command and all below it, as the user types them: `path` is "bench all", for one."""
    for name, below in getattr(command, "commands", {}).items():
        prepare(below, f"{path} {name}")
    return prepare_one(command, path)


def prepare_one(command: Any, path: str) -> Any:
    if (example := EXAMPLES.get(path)) is not None and "Example:" not in (command.help or ""):
        command.epilog = f"Example: {example}"
    own_parameters = command.get_params

    def parameters(context: Any) -> Any:
        # Here, because the option --help is made when it is first asked for.
        found = own_parameters(context)
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found

    command.get_params = parameters
    return command
