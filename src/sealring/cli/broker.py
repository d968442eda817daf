"""`sealring broker`: gives ranks and keys to workers whose evidence passes the policy."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from rich.logging import RichHandler

from sealring.cli.broker_log import (
    Ca,
    LogFolder,
    LogPolicyFile,
    StateFolder,
    StoreUrl,
    audit,
    open_store,
    publish,
    published_log,
)
from sealring.cli.health import health
from sealring.cli.terminal import errors, say
from sealring.errors import ConfigurationError
from sealring.identity.names import WorkerName

if TYPE_CHECKING:  # its packages are an extra
    from sealring.broker.ledger import Ledger
    from sealring.broker.store import View

app = typer.Typer(help="Give ranks and keys to workers whose evidence passes a policy.")
app.command()(health)
app.command()(audit)
app.command()(publish)

T = TypeVar("T")
_PORT: Final = 8443

Job = Annotated[str | None, typer.Option("--job", help="The job.")]
Rank = Annotated[int | None, typer.Option("--rank", help="The rank.")]
Machine = Annotated[str | None, typer.Option("--machine", help="A machine, as the audit names it.")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    policy: Annotated[
        Path | None, typer.Option(help="What may join: a TOML file, see docs/attestation.md.")
    ] = None,
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    listen: Annotated[str, typer.Option(help="Where workers ask.")] = f"0.0.0.0:{_PORT}",
    page: Annotated[
        str, typer.Option(help="Where on this host the read-only page is; `none`: no page.")
    ] = f"127.0.0.1:{_PORT + 1}",
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that workers call it by; this host's if not given."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Data keys, as files REPOSITORY/TYPE/TAG of mode 0600.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of lists, collateral and references.")
    ] = None,
    log: LogFolder = None,
    log_policy: LogPolicyFile = None,
) -> None:
    """Serve until it is stopped. Needs --policy and --ca."""
    if context.invoked_subcommand is not None:
        return
    if policy is None:
        raise ConfigurationError("the broker needs --policy: what may join")
    _start_log()
    asyncio.run(
        _serve(
            policy, ca, store, state, _address(listen), None if page == "none" else _address(page),
            name or _own_names(), keys, cache, log, log_policy,
        )
    )  # fmt: skip


@app.command()
def revoke(
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    job: Job = None,
    rank: Rank = None,
    machine: Machine = None,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Bar a machine that no worker has joined from.")
    ] = False,
) -> None:
    """Take a worker out, or a machine with all its workers."""
    now = time.time()
    if machine is not None:
        barred = _decide(
            ca,
            store,
            state,
            lambda ledger, view: ledger.bar_machine(view, now, machine, unseen=unseen),
        )
    else:
        name = _name(job, rank)
        barred = _decide(ca, store, state, lambda ledger, view: ledger.revoke(view, now, name))
    for one in barred:
        say(f"Out: {one}")
    say("Peers learn of it at their next renewal, new groups at once.")


@app.command()
def release(
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    job: Job = None,
    rank: Rank = None,
    machine: Machine = None,
) -> None:
    """Free a rank, or all ranks of a job, for other workers; or readmit a machine."""
    now = time.time()
    if machine is not None:
        for one in _decide(
            ca, store, state, lambda ledger, view: ledger.readmit_machine(view, now, machine)
        ):
            say(f"Machine {one} may join again.")
    elif job is not None and rank is None:
        freed: list[int] = []
        while some := _decide(
            ca, store, state, lambda ledger, view: ledger.release_some(view, now, job)
        ):
            freed += some
        if not freed:
            raise ConfigurationError(f"no rank of {job} is held")
        say(f"{len(freed)} ranks of {job} are free. What was revoked stays barred.")
    else:
        name = _name(job, rank)
        _decide(ca, store, state, lambda ledger, view: ledger.release(view, now, name))
        say(f"Rank {name.rank} of {name.job} is free.")


@app.command()
def simulator(
    directory: Annotated[Path, typer.Argument(help="Where to keep it.")] = Path("simulator"),
) -> None:
    """Make a source of SIMULATED evidence, to try things out. It proves nothing."""
    from sealring.identity.attestation.attesters import make_simulator

    made = make_simulator(directory)
    say(f"SEALRING_ATTESTER=simulated:{directory}; a policy that lets its workers join says:\n")
    say("[simulated]")
    say(f'roots = ["{made.simulator.fingerprint}"]')
    say(f'measurements = ["{made.measurement.hex()}"]')


async def _serve(
    policy: Path,
    ca: Path,
    store: str | None,
    state: Path | None,
    listen: tuple[str, int],
    page: tuple[str, int] | None,
    names: list[str],
    data_keys: Path | None,
    cache: Path | None,
    log: Path | None,
    log_policy: Path | None,
) -> None:
    from sealring.broker.server import serving
    from sealring.broker.service import Broker, Rules
    from sealring.formats.http import Limits
    from sealring.identity.attestation.files import read_policy, trust_in

    rules, digest = read_policy(policy)
    trust = trust_in(rules, cache)
    keys, opened = open_store(ca, store, state)
    broker = Broker(keys, opened, Rules(rules, digest, trust, data_keys))
    try:
        visible = published_log(state or ca, keys, log, log_policy)
        broker.check_data_keys()
    except BaseException:
        opened.close()
        raise
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        async with serving(
            broker, keys, listen=listen, page=page, names=names, limits=Limits(),
            publish=None if visible is None else lambda: visible.update(opened),
        ) as (port, page_port):  # fmt: skip
            errors.print(f"The broker answers at https://{names[0]}:{port}", highlight=False)
            if page_port is not None and page is not None:
                errors.print(f"Its page is http://{page[0]}:{page_port}/", highlight=False)
            if "simulated" in rules.kinds:
                errors.print(
                    "The policy admits SIMULATED evidence, which proves nothing.", style="bold"
                )
            await stopped.wait()
    finally:
        opened.close()


def _decide(
    ca: Path, store: str | None, state: Path | None, decide: Callable[[Ledger, View], T]
) -> T:
    from sealring.broker.ledger import Ledger

    keys, opened = open_store(ca, store, state)
    ledger = Ledger(keys.audit_key, rejoins=0)
    try:
        return opened.submit(lambda view: decide(ledger, view)).result()
    finally:
        opened.close()


def _name(job: str | None, rank: int | None) -> WorkerName:
    if job is None or rank is None:
        raise ConfigurationError("say which: --job and --rank, or --machine")
    return WorkerName(job, rank)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _own_names() -> list[str]:
    host = socket.gethostname()
    return list(dict.fromkeys([host, socket.getfqdn(), "localhost", "127.0.0.1", "::1"]))


def _start_log() -> None:
    handler = RichHandler(console=errors, show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
