"""The command line: one file or package per verb."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from sealring.cli import (
    attest,
    audit,
    bench,
    broker,
    ca,
    demo,
    doctor,
    log,
    metrics,
    papers,
    plan,
    policy,
    report,
    run,
    statement,
    terminal,
    top,
    trace,
    vault,
    witness,
)
from sealring.cli.help import prepare
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
app.command("top")(top.top)
app.command("metrics")(metrics.metrics)
app.command("doctor")(doctor.doctor)
app.command("attest")(attest.attest)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("audit")(audit.audit)
app.add_typer(policy.app, name="policy")
app.add_typer(broker.app, name="broker")
app.add_typer(bench.app, name="bench")
app.add_typer(ca.app, name="ca")
app.add_typer(trace.app, name="trace")
app.add_typer(log.app, name="log")
app.add_typer(witness.app, name="witness")
app.add_typer(statement.app, name="statement")
app.command("papers")(papers.papers)
app.add_typer(vault.app, name="vault")


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    debug: bool = typer.Option(False, "--debug", help="Show Python's tracebacks of errors."),
) -> None:
    terminal.debug = debug
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The console script. An error is one sentence, and a traceback only with --debug."""
    try:
        prepare(typer.main.get_command(app))()
    except SealringError as error:
        _end(error, "")
    except BrokenPipeError:
        raise
    except OSError as error:
        # A full disk, a directory without rights: of the machine, not of this program.
        where = f"{error.filename}: " if error.filename else ""
        _end(ConfigurationError(f"{where}{error.strerror or error}"), "")
    except Exception as error:
        _end(error, "\nsealring does not know this error: `sealring --debug` shows where it is.")


def _end(error: Exception, advice: str) -> NoReturn:
    if terminal.debug:
        raise error
    errors.print(type(error).__name__, style="bold red", end=": ")
    errors.print(f"{error}{advice}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
