"""The broker's audit log in a folder, cosigned by witnesses: its end cannot be cut off unseen."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner

from sealring.broker.ledger import Ledger
from sealring.broker.published import PublishedLog
from sealring.broker.sqlite import SqliteStore
from sealring.cli import app
from sealring.errors import (
    ConfigurationError,
    ForkedLog,
    NoQuorum,
    TamperedLog,
    TruncatedLog,
)
from sealring.provenance.checkpoints import open_checkpoint
from sealring.provenance.folder import StoredTree, read_checkpoint
from sealring.provenance.policy import Log, LogPolicy
from tests.broker.local import Place
from tests.witness.local import WitnessThread, policy_of


@pytest.fixture
def witnesses(place: Place) -> Iterator[list[WitnessThread]]:
    own = LogPolicy((Log(place.keys.audit_key.verifier),))
    running = [WitnessThread(place.directory / f"w{n}", n, own) for n in (1, 2, 3, 4)]
    with ExitStack() as stack:
        for each in running:
            stack.callback(each.kill)
            each.start()
        policy = policy_of(place.keys.audit_key, [each.listed for each in running])
        (place.directory / "log.policy").write_text(policy.encode())
        yield running


def published(place: Place, policy: LogPolicy | None = None) -> PublishedLog:
    remembered = place.directory / "remembered"
    return PublishedLog(place.directory / "log", place.keys.audit_key, remembered, policy)


def note(place: Place, *events: str, store: str = "store") -> None:
    opened = SqliteStore(place.directory / store, bytes(32))
    ledger = Ledger(place.keys.audit_key, 0)
    for event in events:
        opened.submit(lambda view, e=event: ledger.note(view, 0.0, e)).result()
    opened.close()


def update(place: Place, store: str = "store", policy: LogPolicy | None = None) -> int:
    opened = SqliteStore(place.directory / store, bytes(32))
    try:
        return published(place, policy).update(opened).size
    finally:
        opened.close()


def test_what_was_decided_is_published_once_and_in_order(place: Place) -> None:
    note(place, "first", "second")
    assert update(place) == 2
    assert update(place) == 2
    note(place, *(f"event {n}" for n in range(300)))
    assert update(place) == 302
    folder = place.directory / "log"
    policy = LogPolicy((Log(place.keys.audit_key.verifier),))
    signed = open_checkpoint(read_checkpoint(folder), policy)
    stored = StoredTree(folder, signed.size)
    stored.check_all(signed.root)
    entries = [json.loads(entry) for entry in stored.entries()]
    assert [entry["number"] for entry in entries] == list(range(302))
    assert [entry["event"] for entry in entries[:3]] == ["first", "second", "event 0"]


def test_a_store_that_was_cut_or_rewritten_is_not_published(place: Place) -> None:
    note(place, "first")
    shutil.copy(place.directory / "store", place.directory / "older")
    note(place, "second")
    assert update(place) == 2
    with pytest.raises(TruncatedLog, match="ends before entry 1"):
        update(place, "older")
    note(place, "another second", "third", store="older")
    with pytest.raises(ForkedLog, match="among the first 2"):
        update(place, "older")
    with pytest.raises(TruncatedLog):
        update(place, "empty")
    assert update(place) == 2
    # Without the folder: what was published is remembered, and an honest store fills a new one.
    shutil.rmtree(place.directory / "log")
    with pytest.raises(ForkedLog, match="remembered"):
        update(place, "older")
    with pytest.raises(TruncatedLog, match="remembered"):
        update(place, "empty")
    assert update(place) == 2


def test_an_entry_that_was_changed_before_it_was_published_is_not(place: Place) -> None:
    note(place, "first", "second")
    with sqlite3.connect(place.directory / "store") as rows:
        rows.execute("DROP TRIGGER audit_is_not_changed")
        rows.execute(
            "UPDATE rows SET value = CAST(replace(value, 'first', 'other') AS BLOB) "
            "WHERE key = 'audit/000000000000'"
        )
    rows.close()
    with pytest.raises(TamperedLog):
        update(place)
    assert (
        open_checkpoint(
            read_checkpoint(place.directory / "log"),
            LogPolicy((Log(place.keys.audit_key.verifier),)),
        ).size
        == 0
    )


def test_as_the_operator_and_an_auditor_type_it(
    place: Place, witnesses: list[WitnessThread]
) -> None:
    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    ca, policy = ("--ca", place.ca), ("--log-policy", place.directory / "log.policy")
    store, older = place.ca / "broker.sqlite", place.directory / "older.sqlite"
    opened = place.open_store()
    ledger = Ledger(place.keys.audit_key, 0)
    opened.submit(lambda view: ledger.note(view, 0.0, "first")).result()
    opened.close()
    shutil.copy(store, older)
    opened = place.open_store()
    opened.submit(lambda view: ledger.note(view, 0.0, "second")).result()
    opened.close()
    log = place.directory / "published"
    assert "2 entries, cosigned by witness.example/1, " in run(
        "broker", "publish", log, *ca, *policy
    )
    assert "second" in run("broker", "audit", *ca, *policy)
    # Anybody can read and check the folder, without the broker's key.
    plain = ("--policy", place.directory / "log.policy")
    assert json.loads(run("log", "verify", log, *plain, "--ask", "--json"))["size"] == 2
    proof = place.directory / "second.tlog-proof"
    run("log", "proof", log, 1, *plain, "-o", proof)
    entry = place.directory / "second"
    entry.write_text(run("log", "entry", log, 1, *plain))
    assert json.loads(entry.read_text())["event"] == "second"
    run("log", "verify-proof", proof, entry, *plain)
    # An older copy of the store, with all that this machine remembers of it.
    (place.ca / "broker.version").unlink()
    store.unlink()
    for left in place.ca.glob("broker.sqlite-*"):
        left.unlink()
    shutil.copy(older, store)
    assert "first" in run("broker", "audit", *ca)  # whole by itself
    with pytest.raises(TruncatedLog, match="ends at 1 entries, and the witness"):
        run("broker", "audit", *ca, *policy)
    with pytest.raises(TruncatedLog, match="which was published"):
        run("broker", "publish", place.directory / "elsewhere", *ca, *policy)
    (place.ca / "broker.log.signed").unlink()
    with pytest.raises(TruncatedLog, match="and the witness"):
        run("broker", "publish", place.directory / "elsewhere", *ca, *policy)
    # An emptied one, too.
    (place.ca / "broker.version").unlink()
    store.unlink()
    for left in place.ca.glob("broker.sqlite-*"):
        left.unlink()
    with pytest.raises(TruncatedLog, match="ends at 0 entries"):
        run("broker", "audit", *ca, *policy)
    # One witness is enough to show it: the proof is the log's own signature.
    for each in witnesses[:3]:
        each.kill()
    with pytest.raises(TruncatedLog, match="witness w4"):
        run("broker", "audit", *ca, *policy)


def test_a_policy_without_this_brokers_log(place: Place, witnesses: list[WitnessThread]) -> None:
    stranger = (place.directory / "log.policy").read_text().partition("\n")[2]
    (place.directory / "other.policy").write_text(stranger)
    done = CliRunner().invoke(
        app,
        [
            "broker", "audit", "--ca", str(place.ca),
            "--log-policy", str(place.directory / "other.policy"),
        ],
    )  # fmt: skip
    assert isinstance(done.exception, ConfigurationError)
    assert place.keys.audit_key.verifier.encode() in str(done.exception)


def test_witnesses_are_asked_when_the_log_grows_and_every_half_hour(
    place: Place, witnesses: list[WitnessThread], caplog: pytest.LogCaptureFixture
) -> None:
    note(place, "first")
    policy = policy_of(place.keys.audit_key, [each.listed for each in witnesses])
    opened = SqliteStore(place.directory / "store", bytes(32))
    log = published(place, policy)
    assert len(log.update(opened).cosigned) == 4
    witnesses[0].kill()
    ledger = Ledger(place.keys.audit_key, 0)
    opened.submit(lambda view: ledger.note(view, 0.0, "second")).result()
    assert len(log.update(opened).cosigned) == 3
    for each in witnesses[1:]:
        each.kill()
    caplog.clear()
    assert log.update(opened).size == 2
    assert not caplog.records
    log.clock = lambda: 1e12
    assert log.update(opened).size == 2
    assert len(caplog.records) == 4
    # What is new and has no quorum is published all the same, and said to have none.
    opened.submit(lambda view: ledger.note(view, 0.0, "third")).result()
    with pytest.raises(NoQuorum):
        log.update(opened)
    opened.close()
    own = LogPolicy((Log(place.keys.audit_key.verifier),))
    assert open_checkpoint(read_checkpoint(place.directory / "log"), own).size == 3
