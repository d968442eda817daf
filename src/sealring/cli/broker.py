"""`sealring broker`: gives ranks and keys to workers whose evidence passes the policy."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.logging import RichHandler

from sealring.cli.options import parse_address
from sealring.cli.terminal import console, errors, print_json, say, table, warn
from sealring.core.identity.credentials import read_authorities
from sealring.core.identity.names import WorkerName
from sealring.errors import ConfigurationError
from sealring.formats.files import read_public
from sealring.formats.log import witnesses
from sealring.formats.log.checkpoints import Checkpoint, open_checkpoint
from sealring.formats.log.notes import Note
from sealring.formats.log.policy import Log, LogPolicy, read_policy

if TYPE_CHECKING:  # its packages are an extra
    from sealring.attest.broker.audit import Audited, PublishedLog
    from sealring.attest.broker.keys import BrokerKeys
    from sealring.attest.broker.ledger import JobLedger
    from sealring.attest.broker.service import Broker
    from sealring.attest.broker.store import LedgerStore, StoreView

app = typer.Typer(
    add_completion=False, help="Give ranks and keys to workers whose evidence passes a policy."
)

T = TypeVar("T")
_PORT: Final = 8443
_HEALTH_SECONDS: Final = 10.0
_OWN_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The address at which to ask a broker that listens on every address."""
_HEALTH_JOB: Final = "health"
"""The job's name in a health check. The job need not exist: a broker answers for unknown jobs."""
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
LogPolicyFile = Annotated[
    Path | None,
    typer.Option("--log-policy", help="Its witnesses (c2sp.org/tlog-policy), with their URLs."),
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
    log: Annotated[
        Path | None, typer.Option(help="Publish the audit log in this folder, as it grows.")
    ] = None,
    log_policy: LogPolicyFile = None,
    health: Annotated[
        bool,
        typer.Option("--health", help="Check that the broker at --listen answers; serve nothing."),
    ] = False,
) -> None:
    """Serve until it is stopped. Needs --policy and --ca."""
    if context.invoked_subcommand is not None:
        return
    if health:
        _check_health(ca, listen, name or [])
        return
    if policy is None:
        raise ConfigurationError("the broker needs --policy: what may join")
    from sealring.attest.broker.service import Broker, BrokerRules
    from sealring.attest.evidence import cache as vendors

    handler = RichHandler(console=errors, show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
    addresses = parse_address(listen), None if page == "none" else parse_address(page)
    rules, digest = vendors.read_policy(policy)
    trust = vendors.trust_in(rules, cache)
    own, opened = open_store(ca, store, state)
    with closing(opened):
        broker = Broker(own, opened, BrokerRules(rules, digest, trust, keys))
        visible = published_log(state or ca, own, log, log_policy)
        broker.check_data_keys()
        if "simulated" in rules.kinds:
            warn("The policy admits SIMULATED evidence, which proves nothing.")
        publish = None if visible is None else lambda: visible.update(opened)
        asyncio.run(_serve(broker, own, *addresses, name or _own_names(), publish))


async def _serve(
    broker: Broker,
    keys: BrokerKeys,
    listen: tuple[str, int],
    page: tuple[str, int] | None,
    names: list[str],
    publish: Callable[[], object] | None,
) -> None:
    from sealring.attest.broker.server import serving
    from sealring.formats.http import ServerLimits

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving(
        broker, keys, listen=listen, page=page, names=names, limits=ServerLimits(), publish=publish
    ) as (port, page_port):
        warn(f"The broker answers at https://{names[0]}:{port}")
        if page_port is not None and page is not None:
            warn(f"Its page is http://{page[0]}:{page_port}/")
        await stopped.wait()


def _check_health(ca: Path, listen: str, names: list[str]) -> None:
    """Checks the broker by TLS under its authority, and by a question that reads its store."""
    from sealring.attest.broker.client import BrokerClient

    host, port = parse_address(listen)
    host = _OWN_HOST.get(host, host)
    client = BrokerClient(
        [(names[0] if names else host, port)], read_authorities(ca / "authority.pem")
    )
    asyncio.run(client.keys_out(_HEALTH_JOB, _HEALTH_SECONDS, address=host))
    say("The broker answers.")


@app.command()
def audit(
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    seen: Annotated[
        list[Path] | None,
        typer.Option("--seen", help="A checkpoint that was seen earlier; the log continues it."),
    ] = None,
    log_policy: LogPolicyFile = None,
    json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Check the log from its first entry to its last, and show it.

    With --log-policy, witnesses are asked whether they have seen more of it.
    """
    from sealring.attest.broker import audit as log
    from sealring.attest.broker import strangers

    keys, opened = open_store(ca, store, state)
    key = keys.audit_key.verifier
    with closing(opened):
        found = opened.submit(lambda view: log.check(view, key)).result()
        refused = opened.submit(strangers.refused).result()
    for path in seen or []:
        note = read_public(path, "the checkpoint", ConfigurationError)
        found.require(open_checkpoint(note, LogPolicy((Log(key),))).checkpoint, str(path))
    if log_policy is not None:
        _ask(found, keys, read_policy(log_policy))
    note_text = "" if found.checkpoint is None else found.checkpoint.note.encode().decode()
    if json:
        print_json(
            {
                "entries": found.entries, "number": found.size, "checkpoint": note_text,
                "vkey": key.encode(), "refused": refused,
            }
        )  # fmt: skip
        return
    say(f"{found.size} entries, in a tree whose root is signed")
    columns = ("", "time", "event", "job", "rank", "evidence", "more")
    console.print(table(columns, map(_cells, found.entries), wrap=("job", "evidence", "more")))
    _show_refused(refused)
    say(f"Verifier key: {key.encode()}")
    if note_text:
        say(f"Checkpoint, to keep elsewhere and to pass later as --seen:\n\n{note_text}")


def _cells(entry: dict[str, Any]) -> list[str]:
    plain = [str(entry.get(key, "")) for key in ("event", "job", "rank", "kind")]
    more = " ".join(str(entry[key]) for key in _MORE if key in entry)
    return [str(entry["number"]), _when(entry), *plain, more]


def _when(entry: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(entry['time'], UTC):%Y-%m-%d %H:%M:%S}"


def _show_refused(refused: dict[str, Any]) -> None:
    if not refused["counts"]:
        return
    total = sum(refused["counts"].values())
    kinds = ", ".join(f"{name} {refused['counts'][name]}" for name in sorted(refused["counts"]))
    say(f"Refused before anything was proven, and not in the log: {total} ({kinds}). Last:")
    for one in refused["last"][-_REFUSALS_SHOWN:]:
        say(f"  {_when(one)} {one['address']} {one['error']}: {one['why']}")


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
            (ca, store, state),
            lambda ledger, view: ledger.bar_machine(view, now, machine, unseen=unseen),
        )
    else:
        name = _name(job, rank)
        barred = _decide((ca, store, state), lambda ledger, view: ledger.revoke(view, now, name))
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
    now, place = time.time(), (ca, store, state)
    if machine is not None:
        for one in _decide(place, lambda ledger, view: ledger.readmit_machine(view, now, machine)):
            say(f"Machine {one} may join again.")
    elif job is not None and rank is None:
        freed: list[int] = []
        while some := _decide(place, lambda ledger, view: ledger.release_some(view, now, job)):
            freed += some
        if not freed:
            raise ConfigurationError(f"no rank of {job} is held")
        say(f"{len(freed)} ranks of {job} are free. What was revoked stays barred.")
    else:
        name = _name(job, rank)
        _decide(place, lambda ledger, view: ledger.release(view, now, name))
        say(f"Rank {name.rank} of {name.job} is free.")


def _decide(
    place: tuple[Path, str | None, Path | None], decide: Callable[[JobLedger, StoreView], T]
) -> T:
    from sealring.attest.broker.ledger import JobLedger

    keys, opened = open_store(*place)
    ledger = JobLedger(keys.audit_key, rejoins=0)
    with closing(opened):
        return opened.submit(lambda view: decide(ledger, view)).result()


def _name(job: str | None, rank: int | None) -> WorkerName:
    if job is None or rank is None:
        raise ConfigurationError("say which: --job and --rank, or --machine")
    return WorkerName(job, rank)


def _own_names() -> list[str]:
    host = socket.gethostname()
    return list(dict.fromkeys([host, socket.getfqdn(), "localhost", "127.0.0.1", "::1"]))


def open_store(ca: Path, store: str | None, state: Path | None) -> tuple[BrokerKeys, LedgerStore]:
    from sealring.attest.broker.authenticated import VersionNote
    from sealring.attest.broker.etcd import EtcdStore
    from sealring.attest.broker.keys import open_broker_keys
    from sealring.attest.broker.store import SqliteStore

    keys = open_broker_keys(ca)
    folder = state or ca
    note = VersionNote(folder / "broker.version")
    if store is not None and "://" in store:
        return keys, EtcdStore(store, keys.name, keys.store_key, note)
    path = Path(store) if store else folder / "broker.sqlite"
    return keys, SqliteStore(path, keys.store_key, note)


def published_log(
    state: Path, keys: BrokerKeys, folder: Path | None, policy: Path | None
) -> PublishedLog | None:
    """The published log, with the policy of its witnesses; None if nothing is published."""
    from sealring.attest.broker.audit import PublishedLog

    if folder is None:
        if policy is not None:
            raise ConfigurationError("--log-policy needs --log: the folder to publish in")
        return None
    found = None if policy is None else _with_our_log(read_policy(policy), keys, policy)
    return PublishedLog(folder, keys.audit_key, state / "broker.log.signed", found)


def _ask(found: Audited, keys: BrokerKeys, policy: LogPolicy) -> None:
    trust = _with_our_log(policy, keys, "the policy")
    signed = found.checkpoint
    if signed is None:  # also ask about an empty log: its witnesses may have seen entries
        text = Checkpoint(keys.audit_key.name, 0, found.root).encode()
        signed = open_checkpoint(
            Note(text, (keys.audit_key.sign(text),)).encode(), LogPolicy(trust.logs)
        )
    witnesses.check_newest(signed, found.proof_from, trust)


def _with_our_log(policy: LogPolicy, keys: BrokerKeys, where: object) -> LogPolicy:
    if keys.audit_key.verifier not in {log.verifier for log in policy.logs}:
        raise ConfigurationError(
            f"{where} does not list this broker's log: add the line "
            f"`log {keys.audit_key.verifier.encode()}`"
        )
    return policy
