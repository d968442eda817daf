"""`sealring broker`: gives ranks and keys to workers whose evidence passes the policy."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from sealring.cli.health import health
from sealring.cli.terminal import console, errors, print_json
from sealring.errors import ConfigurationError
from sealring.identity.names import WorkerName

if TYPE_CHECKING:  # its packages are an extra
    from sealring.broker.keys import BrokerKeys
    from sealring.broker.ledger import Ledger
    from sealring.broker.store import Store, View

app = typer.Typer(help="Give ranks and keys to workers whose evidence passes a policy.")
app.command()(health)

T = TypeVar("T")
_PORT: Final = 8443
_MORE: Final = ("guest", "what", "error", "barred")
_REFUSALS_SHOWN: Final = 5

Ca = Annotated[Path, typer.Option("--ca", help="The authority, of `sealring ca init`.")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", help="FILE, or etcd://HOST:PORT,... ; STATE/broker.sqlite if not given."
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option("--state", help="The folder that the broker writes to; CA if not given."),
]
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
            name or _own_names(), keys, cache,
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
        _say(f"Out: {one}")
    _say("Peers learn of it at their next renewal, new groups at once.")


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
            _say(f"Machine {one} may join again.")
    elif job is not None and rank is None:
        freed: list[int] = []
        while some := _decide(
            ca, store, state, lambda ledger, view: ledger.release_some(view, now, job)
        ):
            freed += some
        if not freed:
            raise ConfigurationError(f"no rank of {job} is held")
        _say(f"{len(freed)} ranks of {job} are free. What was revoked stays barred.")
    else:
        name = _name(job, rank)
        _decide(ca, store, state, lambda ledger, view: ledger.release(view, now, name))
        _say(f"Rank {name.rank} of {name.job} is free.")


@app.command()
def audit(
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    head: Annotated[
        str | None, typer.Option(help="A head that was noted earlier; it must be in the log.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Check the log from its first entry to its last, and show it."""
    from sealring.broker import audit as log
    from sealring.broker import strangers

    keys, opened = _open(ca, store, state)
    try:
        public = keys.audit_key.public_key()
        found, entries = opened.submit(lambda view: log.check(view, public, head)).result()
        refused = opened.submit(strangers.refused).result()
    finally:
        opened.close()
    if json:
        print_json(
            {
                "entries": entries, "head": found.digest, "number": found.number,
                "refused": refused,
            }
        )  # fmt: skip
        return
    table = Table(title=f"{found.number} entries, each committed to by the next")
    for column in ("", "time", "event", "job", "rank", "evidence", "more"):
        table.add_column(column)
    for entry in entries:
        more = " ".join(str(entry[key]) for key in _MORE if key in entry)
        when = datetime.fromtimestamp(entry["time"], UTC)
        table.add_row(
            str(entry["number"]), f"{when:%Y-%m-%d %H:%M:%S}", entry["event"],
            str(entry.get("job", "")), str(entry.get("rank", "")),
            Text(str(entry.get("kind", ""))), Text(more, overflow="fold"),
        )  # fmt: skip
    console.print(table)
    if refused["counts"]:
        total = sum(refused["counts"].values())
        kinds = ", ".join(f"{name} {refused['counts'][name]}" for name in sorted(refused["counts"]))
        _say(f"Refused before anything was proven, and not in the log: {total} ({kinds}). Last:")
        for one in refused["last"][-_REFUSALS_SHOWN:]:
            when = datetime.fromtimestamp(one["time"], UTC)
            _say(f"  {when:%Y-%m-%d %H:%M:%S} {one['address']} {one['error']}: {one['why']}")
    _say(f"Head: {found.digest}")


@app.command()
def simulator(
    directory: Annotated[Path, typer.Argument(help="Where to keep it.")] = Path("simulator"),
) -> None:
    """Make a source of SIMULATED evidence, to try things out. It proves nothing."""
    from sealring.identity.attestation.attesters import make_simulator

    made = make_simulator(directory)
    _say(f"SEALRING_ATTESTER=simulated:{directory}; a policy that lets its workers join says:\n")
    _say("[simulated]")
    _say(f'roots = ["{made.simulator.fingerprint}"]')
    _say(f'measurements = ["{made.measurement.hex()}"]')


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
) -> None:
    from sealring.broker.http import Limits
    from sealring.broker.server import serving
    from sealring.broker.service import Broker, Rules
    from sealring.identity.attestation.files import read_policy, trust_in

    rules, digest = read_policy(policy)
    trust = trust_in(rules, cache)
    keys, opened = _open(ca, store, state)
    broker = Broker(keys, opened, Rules(rules, digest, trust, data_keys))
    try:
        broker.check_data_keys()
        await opened.transact(lambda view: None)  # a store that is not ours is refused here
    except BaseException:
        opened.close()
        raise
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        async with serving(
            broker, keys, listen=listen, page=page, names=names, limits=Limits()
        ) as (port, page_port):
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


def _open(ca: Path, store: str | None, state: Path | None) -> tuple[BrokerKeys, Store]:
    from sealring.broker.authenticated import VersionNote
    from sealring.broker.etcd import EtcdStore
    from sealring.broker.keys import open_broker_keys
    from sealring.broker.sqlite import SqliteStore

    keys = open_broker_keys(ca)
    folder = state or ca
    note = VersionNote(folder / "broker.version")
    if store is not None and "://" in store:
        return keys, EtcdStore(store, keys.name, keys.store_key, note)
    path = Path(store) if store else folder / "broker.sqlite"
    return keys, SqliteStore(path, keys.store_key, note)


def _decide(
    ca: Path, store: str | None, state: Path | None, decide: Callable[[Ledger, View], T]
) -> T:
    from sealring.broker.ledger import Ledger

    keys, opened = _open(ca, store, state)
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


def _say(text: str) -> None:
    # No markup and no wrapping: people copy it.
    console.print(text, markup=False, highlight=False, soft_wrap=True)
