"""The command line: one module or package for each verb."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import typer

from sealring.cli import terminal
from sealring.cli.terminal import errors, harmless
from sealring.cli.verbs import VerbsOnDemand
from sealring.errors import ConfigurationError, SealringError, named
from sealring.formats.files import is_full, not_written
from sealring.version import __version__

app = typer.Typer(
    name="sealring",
    cls=VerbsOnDemand,
    help="Train PyTorch models over links that are encrypted and authenticated.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    debug: bool = typer.Option(False, "--debug", help="Show Python's tracebacks of errors."),
) -> None:
    terminal.debug = debug
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main(commands: typer.Typer = app) -> None:
    """The console script. Prints an error as one sentence, and its traceback only with --debug."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # If the encoding lacks a character (such as µ), the rest of the text is still shown.
        sys.stdout.reconfigure(errors="replace")
    try:
        typer.main.get_command(commands)()
    except SealringError as error:
        _end(error, "")
    except BrokenPipeError:
        raise
    except OSError as error:
        # A problem of the machine, not of this program: a full disk, missing rights.
        where = error.filename or ""
        if is_full(error):
            _end(not_written(where or "a file", error), "")
        _end(ConfigurationError(f"{where}{': ' * bool(where)}{error.strerror or error}"), "")
    except Exception as error:
        _end(error, "\nsealring does not know this error: `sealring --debug` shows where it is.")


def _end(error: Exception, advice: str) -> NoReturn:
    if terminal.debug:
        raise error
    errors.print(named(error), style="bold red", end=": ")
    errors.print(f"{harmless(str(error))}{advice}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
