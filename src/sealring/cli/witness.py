"""`sealring witness`: cosigns checkpoints of logs that only grow (c2sp.org/tlog-witness)."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.logging import RichHandler

from sealring.cli.terminal import errors, say
from sealring.errors import ConfigurationError
from sealring.formats.log.notes import Kind, Signer
from sealring.formats.log.policy import LogPolicy, read_policy
from sealring.record.provenance.owners import read_signer, write_key_pair

app = typer.Typer(help="Cosign checkpoints of logs, and never two that contradict each other.")


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    key: Annotated[Path, typer.Option(help="Of `sealring witness init`.")] = Path("witness.key"),
    logs: Annotated[
        Path | None,
        typer.Option(help="The logs to witness: the log lines of a c2sp.org/tlog-policy file."),
    ] = None,
    state: Annotated[
        Path, typer.Option(help="What was cosigned. Losing it breaks the witness's promise.")
    ] = Path("witness-state"),
    listen: Annotated[str, typer.Option(help="Where logs ask.")] = "127.0.0.1:8446",
) -> None:
    """Serve until it is stopped. Needs --logs."""
    if context.invoked_subcommand is not None:
        return
    if logs is None:
        raise ConfigurationError("the witness needs --logs: which logs to witness")
    handler = RichHandler(console=errors, show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{listen!r} is not HOST:PORT")
    signer = read_signer(key)
    asyncio.run(_serve(signer, read_policy(logs), state, host.strip("[]"), int(port)))


@app.command()
def init(
    name: Annotated[str, typer.Option(help="The witness's name for ever, e.g. example.com/w1.")],
    key: Annotated[Path, typer.Option(help="The file to write.")] = Path("witness.key"),
) -> None:
    """Make a witness's keys; print the verifier key that goes into policies.

    It is also in a file beside the key: witness.vkey for witness.key.
    """
    signer = Signer.generate(name, Kind.COSIGNATURE)
    public = write_key_pair(key, signer)
    say(f"The key is {key}. Policies need this verifier key, {public}:")
    say(signer.verifier.encode())


async def _serve(signer: Signer, policy: LogPolicy, folder: Path, host: str, port: int) -> None:
    from sealring.record.witness.server import serving  # its packages are an extra
    from sealring.record.witness.state import WitnessState

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with WitnessState(folder, signer, policy) as state:
        async with serving(state, host, port) as found:
            for origin, size in state.logs:
                errors.print(f"{origin}: {size} entries cosigned", highlight=False, markup=False)
            errors.print(f"{signer.name} answers at http://{host}:{found}", highlight=False)
            await stopped.wait()
