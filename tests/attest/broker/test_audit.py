"""The audit log: a change of it is noticed, and the store refuses to change it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.attest.broker import audit
from sealring.attest.broker.store import SqliteStore, StoreView
from sealring.errors import BrokerUnavailable, TamperedStore
from sealring.formats.log.notes import SignatureKind, Signer
from tests.codes import coded
from tests.record.statements import slow

KEY = Signer.generate("broker.sealring/test", SignatureKind.NOTE)


class Rows(dict[str, bytes]):
    """A store without any guard."""

    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for key, value in self.items() if start <= key < end)


def written(entries: int = 4, event: str = "joined") -> Rows:
    rows = Rows()
    for number in range(entries):
        change(rows, lambda view, n=number: audit.append(view, KEY, n, event, {"rank": n}))
    return rows


def change(rows: Rows, act: Callable[[StoreView], Any]) -> Any:
    view = StoreView(rows, {})
    found = act(view)
    for key, value in view.writes.items():
        rows[key] = value if value is not None else b""
        if value is None:
            del rows[key]
    return found


def check(rows: Rows) -> audit.Audited:
    return audit.check(StoreView(rows, {}), KEY.verifier)


def entry(number: int) -> str:
    return f"audit/{number:012d}"


def test_a_log_that_is_whole() -> None:
    for size in (1, 2, 3, 4, 7, 8, 9):
        found = check(written(size))
        leaves = [audit.encode(each) for each in found.entries]
        assert [each["rank"] for each in found.entries] == list(range(size))
        assert found.checkpoint is not None
        assert found.checkpoint.root == found.root == slow.mth(leaves)
        for old in range(1, size + 1):
            root, proof = found.proof_from(old)
            assert (root, proof) == (slow.mth(leaves[:old]), slow.proof(old, leaves))
    empty = check(Rows())
    assert (empty.size, empty.checkpoint, empty.root) == (0, None, slow.mth([]))


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.threat("B26")
def test_an_entry_changed_dropped_or_signed_by_another(number: int) -> None:
    rows = written()
    rows[entry(number)] = rows[entry(number)].replace(b'"joined"', b'"gained"')
    with pytest.raises(
        TamperedStore, match=f"entry {number} ", check=coded("broker.broken_audit_log")
    ):
        check(rows)
    rows = written()
    del rows[entry(number)]
    with pytest.raises(TamperedStore, check=coded("broker.broken_audit_log")):
        check(rows)
    rows = written()
    rows[entry(number)] = written(4, "gained")[entry(number)]  # signed, but of another log
    with pytest.raises(
        TamperedStore,
        match=f"entry {number} " if number else "entry",
        check=coded("broker.broken_audit_log"),
    ):
        check(rows)
    for broken in (b"{}", b'{"entry": 1}', b'{"entry": {"number": %d}}' % number):
        rows[entry(number)] = broken
        with pytest.raises(
            TamperedStore, match=f"entry {number} ", check=coded("broker.broken_audit_log")
        ):
            check(rows)
    stranger = Signer.generate(KEY.name, SignatureKind.NOTE).verifier
    with pytest.raises(TamperedStore, match="entry 0 ", check=coded("broker.broken_audit_log")):
        audit.check(StoreView(written(), {}), stranger)


@pytest.mark.threat("B26")
def test_entries_exchanged_or_added_and_the_end_cut_off() -> None:
    rows = written()
    rows[entry(2)], rows[entry(3)] = rows[entry(3)], rows[entry(2)]
    with pytest.raises(TamperedStore, check=coded("broker.broken_audit_log")):
        check(rows)
    rows = written()
    head = rows[audit.HEAD]
    change(rows, lambda view: audit.append(view, KEY, 9, "joined", {}))
    rows[audit.HEAD] = head
    with pytest.raises(
        TamperedStore, match="cut off or added", check=coded("broker.broken_audit_log")
    ):
        check(rows)
    rows = written()
    del rows[entry(3)]
    with pytest.raises(
        TamperedStore, match="cut off or added", check=coded("broker.broken_audit_log")
    ):
        check(rows)


@pytest.mark.threat("B26")
def test_a_log_that_was_cut_or_rewritten_contradicts_a_checkpoint_seen_earlier() -> None:
    whole = check(written(4))
    assert whole.checkpoint is not None
    seen = whole.checkpoint.checkpoint
    check(written(9)).require(seen, "what was seen")
    with pytest.raises(
        TamperedStore,
        match="ends at 3 entries, and what was seen has 4",
        check=coded("broker.broken_audit_log"),
    ):
        check(written(3)).require(seen, "what was seen")
    with pytest.raises(
        TamperedStore,
        match=r"first 4 entries .* not those of what was seen",
        check=coded("broker.broken_audit_log"),
    ):
        check(written(9, "gained")).require(seen, "what was seen")


def test_a_log_of_an_older_form_is_not_continued() -> None:
    rows = Rows({audit.HEAD: b'{"number": 4, "digest": "00"}'})
    with pytest.raises(
        TamperedStore, match="older sealring", check=coded("broker.broken_audit_log")
    ):
        change(rows, lambda view: audit.append(view, KEY, 0, "joined", {}))


@pytest.mark.threat("B26")
def test_the_store_does_not_let_it_be_changed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store", bytes(32))
    store.submit(lambda view: audit.append(view, KEY, 0, "joined", {})).result()
    for act in (
        lambda view: view.put(entry(0), {}),
        lambda view: view.delete(entry(0)),
    ):
        with pytest.raises(
            BrokerUnavailable, match="only grows", check=coded("broker.store_unavailable")
        ):
            store.submit(act).result()
    store.close()
    with sqlite3.connect(tmp_path / "store") as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("DELETE FROM rows")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


def test_a_decision_that_fails_leaves_nothing_and_takes_no_other_with_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store", bytes(32))

    def fails(view: StoreView) -> None:
        view.put("a", {"n": 1})
        raise KeyError("no")

    waiting = [store.submit(lambda view, n=n: view.put(f"b{n}", {"n": n})) for n in range(3)]
    failing = store.submit(fails)
    waiting += [store.submit(lambda view, n=n: view.put(f"b{n}", {"n": n})) for n in range(3, 6)]
    with pytest.raises(KeyError):
        failing.result()
    for future in waiting:
        future.result()
    found = store.submit(lambda view: [key for key, _ in view.scan("")]).result()
    assert found == [f"b{n}" for n in range(6)]
    store.close()
    with pytest.raises(
        BrokerUnavailable, match="stopping", check=coded("broker.store_unavailable")
    ):
        store.submit(fails).result()


def test_a_call_that_is_given_up_ends_no_other(tmp_path: Path) -> None:
    """A broker that stops cancels what its clients wait for, but still has something to write."""
    store = SqliteStore(tmp_path / "store", bytes(32))
    began, go_on = threading.Event(), threading.Event()

    def first(view: StoreView) -> None:
        began.set()
        assert go_on.wait(20)

    store.submit(first)
    assert began.wait(20)
    given_up = store.submit(lambda view: view.put("given up", {"n": 1}))
    kept = store.submit(lambda view: view.put("kept", {"n": 2}))
    assert given_up.cancel()
    go_on.set()
    kept.result(20)
    found = store.submit(lambda view: [key for key, _ in view.scan("")]).result(20)
    assert found == ["kept"]
    store.close()
