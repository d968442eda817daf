"""The audit log: a change of it is detected, and the store does not let it be changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.broker import audit
from sealring.broker.sqlite import SqliteStore
from sealring.broker.store import View
from sealring.errors import BrokenAuditLog, StoreUnavailable

KEY = Ed25519PrivateKey.generate()


class Rows(dict[str, bytes]):
    """A store without any guard."""

    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for key, value in self.items() if start <= key < end)


def written(entries: int = 4) -> Rows:
    rows = Rows()
    for number in range(entries):
        change(rows, lambda view, n=number: audit.append(view, KEY, n, "joined", {"rank": n}))
    return rows


def change(rows: Rows, act: Callable[[View], Any]) -> Any:
    view = View(rows, {})
    found = act(view)
    for key, value in view.writes.items():
        rows[key] = value if value is not None else b""
        if value is None:
            del rows[key]
    return found


def check(rows: Rows, noted: str | None = None) -> audit.Head:
    return audit.check(View(rows, {}), KEY.public_key(), noted)[0]


def entry(number: int) -> str:
    return f"audit/{number:012d}"


def test_a_log_that_is_whole() -> None:
    rows = written()
    early = check(written(2)).digest
    assert check(rows).number == 4
    assert check(rows, check(rows).digest).number == 4
    assert check(rows, audit.START).number == 4
    assert check(Rows()).number == 0
    assert early != check(rows).digest


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_entry_changed_dropped_or_signed_by_another(number: int) -> None:
    rows = written()
    rows[entry(number)] = rows[entry(number)].replace(b'"joined"', b'"gained"')
    with pytest.raises(BrokenAuditLog, match=f"entry {number} "):
        check(rows)
    rows = written()
    del rows[entry(number)]
    with pytest.raises(BrokenAuditLog):
        check(rows)
    stranger = Ed25519PrivateKey.generate().public_key()
    with pytest.raises(BrokenAuditLog, match="entry 1 "):
        audit.check(View(written(), {}), stranger)


def test_entries_exchanged_or_added_and_the_end_cut_off() -> None:
    rows = written()
    rows[entry(2)], rows[entry(3)] = rows[entry(3)], rows[entry(2)]
    with pytest.raises(BrokenAuditLog):
        check(rows)
    rows = written()
    head = rows[audit.HEAD]
    change(rows, lambda view: audit.append(view, KEY, 9, "joined", {}))
    rows[audit.HEAD] = head
    with pytest.raises(BrokenAuditLog, match="cut off or added"):
        check(rows)
    # Cut off with its head, it looks whole to all but those who noted the head.
    whole, cut = written(4), written(3)
    with pytest.raises(BrokenAuditLog, match="noted earlier"):
        check(cut, check(whole).digest)


def test_the_store_does_not_let_it_be_changed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store", bytes(32))
    store.submit(lambda view: audit.append(view, KEY, 0, "joined", {})).result()
    for act in (
        lambda view: view.put(entry(1), {}),
        lambda view: view.delete(entry(1)),
    ):
        with pytest.raises(StoreUnavailable, match="only grows"):
            store.submit(act).result()
    store.close()
    with sqlite3.connect(tmp_path / "store") as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("DELETE FROM rows")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


def test_a_decision_that_fails_leaves_nothing_and_takes_no_other_with_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store", bytes(32))

    def fails(view: View) -> None:
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
    with pytest.raises(StoreUnavailable, match="stopping"):
        store.submit(fails).result()
