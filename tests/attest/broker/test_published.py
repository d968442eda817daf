"""The broker's audit log in a folder with witnesses: its end cannot be cut off unnoticed."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.attest.broker import audit, server
from sealring.attest.broker.audit import PublishedLog
from sealring.attest.broker.ledger import JobLedger
from sealring.attest.broker.store import SqliteStore
from sealring.cli import app
from sealring.errors import (
    ConfigurationError,
    DiskFull,
    ForkedLog,
    LogError,
    TamperedLog,
    TamperedStore,
)
from sealring.formats.files import DurableFiles
from sealring.formats.http import Response, ServerLimits
from sealring.formats.log.checkpoints import SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import StoredTree, read_checkpoint
from sealring.formats.log.policy import Log, LogPolicy, read_policy
from tests.attest.broker.local import Place
from tests.codes import coded
from tests.record.witness.local import WitnessThread, policy_of


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
    ledger = JobLedger(place.keys.audit_key, 0)
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


@pytest.mark.threat("B26")
def test_a_store_that_was_cut_or_rewritten_is_not_published(place: Place) -> None:
    note(place, "first")
    shutil.copy(place.directory / "store", place.directory / "older")
    note(place, "second")
    assert update(place) == 2
    with pytest.raises(ForkedLog, match="ends before entry 1", check=coded("log.truncated_log")):
        update(place, "older")
    note(place, "another second", "third", store="older")
    with pytest.raises(ForkedLog, match="among the first 2"):
        update(place, "older")
    with pytest.raises(ForkedLog, check=coded("log.truncated_log")):
        update(place, "empty")
    assert update(place) == 2
    # Without the folder, the remembered checkpoint still counts. An honest store fills a new one.
    shutil.rmtree(place.directory / "log")
    with pytest.raises(ForkedLog, match="remembered"):
        update(place, "older")
    with pytest.raises(ForkedLog, match="remembered", check=coded("log.truncated_log")):
        update(place, "empty")
    assert update(place) == 2


@pytest.mark.threat("B26")
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


@pytest.mark.threat("B26")
def test_as_the_operator_and_an_auditor_type_it(
    place: Place, witnesses: list[WitnessThread]
) -> None:
    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    def publish(folder: Path) -> SignedCheckpoint:
        policy = read_policy(place.directory / "log.policy")
        signed = place.ca / "broker.log.signed"
        with closing(place.open_store()) as opened:
            return PublishedLog(folder, place.keys.audit_key, signed, policy).update(opened)

    ca, policy = ("--ca", place.ca), ("--log-policy", place.directory / "log.policy")
    store, older = place.ca / "broker.sqlite", place.directory / "older.sqlite"
    opened = place.open_store()
    ledger = JobLedger(place.keys.audit_key, 0)
    opened.submit(lambda view: ledger.note(view, 0.0, "first")).result()
    opened.close()
    shutil.copy(store, older)
    opened = place.open_store()
    opened.submit(lambda view: ledger.note(view, 0.0, "second")).result()
    opened.close()
    log = place.directory / "published"
    published = publish(log)
    assert published.size == 2
    assert "witness.example/1" in {key.name for key in published.cosigned}
    assert "second" in run("broker", "audit", *ca, *policy)
    # Anybody can read and check the folder without the broker's key.
    plain = ("--policy", place.directory / "log.policy")
    assert json.loads(run("audit", "log", log, *plain, "--ask", "--json"))["size"] == 2
    proof = place.directory / "second.tlog-proof"
    entry = place.directory / "second"
    run("audit", "proof", log, 1, *plain, "-o", proof, "--entry", entry)
    assert json.loads(entry.read_text())["event"] == "second"
    run("audit", "verify", entry, "--proof", proof, *plain)
    # Puts back an older copy of the store, with the notes that this machine kept of it.
    (place.ca / "broker.version").unlink()
    store.unlink()
    for left in place.ca.glob("broker.sqlite-*"):
        left.unlink()
    shutil.copy(older, store)
    assert "first" in run("broker", "audit", *ca)  # consistent by itself
    with pytest.raises(
        ForkedLog, match="ends at 1 entries, and the witness", check=coded("log.truncated_log")
    ):
        run("broker", "audit", *ca, *policy)
    with pytest.raises(ForkedLog, match="which was published", check=coded("log.truncated_log")):
        publish(place.directory / "elsewhere")
    (place.ca / "broker.log.signed").unlink()
    with pytest.raises(ForkedLog, match="and the witness", check=coded("log.truncated_log")):
        publish(place.directory / "elsewhere")
    # Also with an empty store.
    (place.ca / "broker.version").unlink()
    store.unlink()
    for left in place.ca.glob("broker.sqlite-*"):
        left.unlink()
    with pytest.raises(ForkedLog, match="ends at 0 entries", check=coded("log.truncated_log")):
        run("broker", "audit", *ca, *policy)
    # One witness is enough to show it, because the log itself signed the checkpoint.
    for each in witnesses[:3]:
        each.kill()
    with pytest.raises(ForkedLog, match="witness w4", check=coded("log.truncated_log")):
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
    ledger = JobLedger(place.keys.audit_key, 0)
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
    # A new entry without a quorum is published all the same, and an error says so.
    opened.submit(lambda view: ledger.note(view, 0.0, "third")).result()
    with pytest.raises(LogError, check=coded("log.no_quorum")):
        log.update(opened)
    opened.close()
    own = LogPolicy((Log(place.keys.audit_key.verifier),))
    assert open_checkpoint(read_checkpoint(place.directory / "log"), own).size == 3


@pytest.mark.parametrize(
    "value",
    [b"{", b"[" * 100_000, b"\xff\xfe", "text", 5, b"[]", b"null", b'{"entry":null}',
     b'{"entry":{"number":1,"x":' + b"9" * 5000 + b'},"checkpoint":"x"}'],
    ids=["cut", "deep", "no text", "text", "number", "list", "null", "no entry", "digits"],
)  # fmt: skip
@pytest.mark.threat("B27")
def test_a_row_that_is_no_entry_is_named_and_not_published(
    place: Place, value: bytes | str | int
) -> None:
    note(place, "first", "second", "third")
    with sqlite3.connect(place.directory / "store") as database:
        database.executescript("DROP TRIGGER audit_is_not_changed")
        database.execute("UPDATE rows SET value = ? WHERE key = 'audit/000000000001'", (value,))
    opened = SqliteStore(place.directory / "store", bytes(32))
    key = place.keys.audit_key.verifier
    with pytest.raises(
        TamperedStore, match="entry 1 of the log is", check=coded("broker.broken_audit_log")
    ):
        opened.submit(lambda view: audit.check(view, key)).result()
    opened.close()
    with pytest.raises((TamperedStore, TamperedLog)):
        update(place)
    assert published_size(place) == 0


@pytest.mark.parametrize("value", ["text", 5])
@pytest.mark.parametrize("row", ["state", "audit/head"])
@pytest.mark.threat("B27")
def test_a_row_of_another_type_is_a_tampered_store(
    place: Place, row: str, value: str | int
) -> None:
    note(place, "first")
    with sqlite3.connect(place.directory / "store") as database:
        database.execute("UPDATE rows SET value = ? WHERE key = ?", (value, row))
    with pytest.raises(TamperedStore):
        update(place)


def published_size(place: Place) -> int:
    policy = LogPolicy((Log(place.keys.audit_key.verifier),))
    return open_checkpoint(read_checkpoint(place.directory / "log"), policy).size


@pytest.mark.threat("B27", "L21")
def test_a_disk_that_is_full_at_any_checkpoint_and_has_room_again(
    place: Place, witnesses: list[WitnessThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the first checkpoint, at that of the entries, and at the cosigned one."""
    policy = policy_of(place.keys.audit_key, [each.listed for each in witnesses])
    note(place, "first")
    real = DurableFiles.write
    for room in (0, 1, 1):  # each time the log gets one step further
        left = iter(range(room))

        def write(
            self: DurableFiles, name: str, content: bytes, left: Iterator[int] = left
        ) -> None:
            if name == "checkpoint" and next(left, None) is None:
                raise OSError(28, "No space left on device")
            real(self, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(DurableFiles, "write", write)
            with pytest.raises(DiskFull, match="cannot be written: No space left"):
                update(place, policy=policy)
    assert update(place, policy=policy) == 1


@pytest.mark.threat("B27")
def test_a_chore_that_fails_is_done_again_and_ends_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the broker would publish and delete nothing more, and its certificate would end."""
    monkeypatch.setattr(server, "_SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(server, "_OWN_CERTIFICATE_SECONDS", 0.0)
    seen: list[str] = []

    def publish() -> None:
        seen.append("publish")
        raise OSError(28, "No space left on device")

    async def main() -> None:
        store = place.open_store()
        broker = place.broker(store)
        enough = asyncio.Event()

        class Renewing(server.Server):
            def renew_own_certificate(self) -> None:
                super().renew_own_certificate()
                seen.append("renew")
                if seen.count("renew") == 4:
                    enough.set()
                raise_once()

        def raise_once() -> None:
            if seen.count("renew") == 2:
                raise RuntimeError("once")

        own = Renewing(place.keys, ["localhost"], ServerLimits(), lambda *_: Response(500, b""))
        chores = asyncio.create_task(server.run_chores(broker, own, publish))
        async with asyncio.timeout(60):
            await enough.wait()
        chores.cancel()
        store.close()

    asyncio.run(main())
    assert seen.count("publish") >= 3
    assert "OSError: [Errno 28] No space left on device" in caplog.text
    assert "RuntimeError: once" in caplog.text
