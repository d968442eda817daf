"""`sealring broker audit` and `publish`: the log of what a broker decided."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sealring.cli.terminal import console, print_json, say
from sealring.errors import ConfigurationError
from sealring.formats.files import read_public
from sealring.formats.log import witnesses
from sealring.formats.log.checkpoints import Checkpoint, open_checkpoint
from sealring.formats.log.notes import Note
from sealring.formats.log.policy import Log, LogPolicy, read_policy

if TYPE_CHECKING:  # its packages are an extra
    from sealring.broker.audit import Audited
    from sealring.broker.keys import BrokerKeys
    from sealring.broker.published import PublishedLog
    from sealring.broker.store import Store

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
LogFolder = Annotated[
    Path | None, typer.Option("--log", help="Publish the audit log in this folder, as it grows.")
]
LogPolicyFile = Annotated[
    Path | None,
    typer.Option("--log-policy", help="Its witnesses (c2sp.org/tlog-policy), with their URLs."),
]


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
    from sealring.broker import audit as log
    from sealring.broker import strangers

    keys, opened = open_store(ca, store, state)
    key = keys.audit_key.verifier
    try:
        found = opened.submit(lambda view: log.check(view, key)).result()
        refused = opened.submit(strangers.refused).result()
    finally:
        opened.close()
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
    console.print(_table(found))
    _show_refused(refused)
    say(f"Verifier key: {key.encode()}")
    if note_text:
        say(f"Checkpoint, to keep elsewhere and to pass later as --seen:\n\n{note_text}")


def publish(
    log: Annotated[Path, typer.Argument(help="The folder, made if missing.")],
    ca: Ca = Path("sealring-ca"),
    store: StoreUrl = None,
    state: StateFolder = None,
    log_policy: LogPolicyFile = None,
) -> None:
    """Bring the published audit log up to date, and have the policy's witnesses cosign it."""
    keys, opened = open_store(ca, store, state)
    try:
        published = published_log(state or ca, keys, log, log_policy)
        assert published is not None
        signed = published.update(opened)
    finally:
        opened.close()
    cosigned = ", ".join(sorted(key.name for key in signed.cosigned)) or "no witness"
    say(f"{log}: {signed.size} entries, cosigned by {cosigned}.")
    say(f"Verifier key: {keys.audit_key.verifier.encode()}")


def open_store(ca: Path, store: str | None, state: Path | None) -> tuple[BrokerKeys, Store]:
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


def published_log(
    state: Path, keys: BrokerKeys, folder: Path | None, policy: Path | None
) -> PublishedLog | None:
    """The folder to publish in, and whom to ask; None if nothing is published."""
    from sealring.broker.published import PublishedLog

    if folder is None:
        if policy is not None:
            raise ConfigurationError("--log-policy needs --log: the folder to publish in")
        return None
    found = None if policy is None else _with_our_log(read_policy(policy), keys, policy)
    return PublishedLog(folder, keys.audit_key, state / "broker.log.signed", found)


def _ask(found: Audited, keys: BrokerKeys, policy: LogPolicy) -> None:
    trust = _with_our_log(policy, keys, "the policy")
    signed = found.checkpoint
    if signed is None:  # an empty log too: its witnesses may have seen entries
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


def _table(found: Audited) -> Table:
    table = Table(title=f"{found.size} entries, in a tree whose root is signed")
    for column in ("", "time", "event", "job", "rank", "evidence", "more"):
        table.add_column(column)
    for entry in found.entries:
        more = " ".join(str(entry[key]) for key in _MORE if key in entry)
        when = datetime.fromtimestamp(entry["time"], UTC)
        table.add_row(
            str(entry["number"]), f"{when:%Y-%m-%d %H:%M:%S}", entry["event"],
            str(entry.get("job", "")), str(entry.get("rank", "")),
            Text(str(entry.get("kind", ""))), Text(more, overflow="fold"),
        )  # fmt: skip
    return table


def _show_refused(refused: dict[str, Any]) -> None:
    if not refused["counts"]:
        return
    total = sum(refused["counts"].values())
    kinds = ", ".join(f"{name} {refused['counts'][name]}" for name in sorted(refused["counts"]))
    say(f"Refused before anything was proven, and not in the log: {total} ({kinds}). Last:")
    for one in refused["last"][-_REFUSALS_SHOWN:]:
        when = datetime.fromtimestamp(one["time"], UTC)
        say(f"  {when:%Y-%m-%d %H:%M:%S} {one['address']} {one['error']}: {one['why']}")
