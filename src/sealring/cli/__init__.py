"""The command line: one file or package per verb."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from sealring.cli import (
    attest,
    bench,
    broker,
    ca,
    demo,
    doctor,
    plan,
    policy,
    report,
    run,
    trace,
    vault,
)
from sealring.cli.terminal import errors
from sealring.errors import ConfigurationError, SealringError
from sealring.version import __version__

app = typer.Typer(
    name="sealring",
    help="Train PyTorch models over links that are encrypted and authenticated.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("run", context_settings=run.PASS_ON)(run.run)
app.command("doctor")(doctor.doctor)
app.command("attest")(attest.attest)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.add_typer(policy.app, name="policy")
app.add_typer(broker.app, name="broker")
app.add_typer(bench.app, name="bench")
app.add_typer(ca.app, name="ca")
app.add_typer(trace.app, name="trace")
app.add_typer(vault.app, name="vault")


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The console script. An error of ours is a sentence, not a traceback; exit status 2."""
    try:
        app()
    except SealringError as error:
        _end(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        # A full disk, a directory without rights: of the machine, not of this program.
        where = f"{error.filename}: " if error.filename else ""
        _end(ConfigurationError(f"{where}{error.strerror or error}"))


def _end(error: SealringError) -> NoReturn:
    errors.print(type(error).__name__, style="bold red", end=": ")
    errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
