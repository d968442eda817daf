"""A store that refuses a part of what is asked, lists without end, or writes hostile errors."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sealring.errors import MissingPart, RolledBack, StoreFailed
from sealring.vault import Vault, keys, requests, trees
from sealring.vault.opened import KeyChange
from sealring.vault.stores import Store
from tests.vault.conftest import clear_memory_store
from tests.vault.test_store_faults import Answer, Proxy, proxy, stored

__all__ = ["proxy", "stored"]


def seal(vault: Vault, folder: Path, content: bytes) -> int:
    (folder / "source").write_bytes(content)
    return trees.seal_path(vault, folder / "source", "data", None, lambda _: None)


def refused_deletes(files: str) -> Answer:
    """As S3 answers where this user may not remove some files: all went well, but for these."""
    document = (
        '<?xml version="1.0"?><DeleteResult><Error><Key>any</Key><Code>AccessDenied</Code>'
        "<Message>Access Denied</Message></Error></DeleteResult>"
    )

    def answer(method: str, path: str) -> tuple[int, bytes] | None:
        return (200, document.encode()) if re.search(files, f"{method} {path}") else None

    return answer


@pytest.mark.threat("V34")
def test_files_that_a_store_refuses_to_remove_are_told(
    stored: Vault, proxy: Proxy, tmp_path: Path
) -> None:
    """`rm` said that they were removed, and `rotate` that nothing is left under older keys."""
    seal(stored, tmp_path, b"1")
    before: Any = stored.find("data").copy.folder
    proxy.answer = refused_deletes(r"^POST .*\bdelete\b")
    with pytest.raises(StoreFailed, match="is still there after it was removed"):
        trees.rotate(stored, lambda _: None)
    with pytest.raises(StoreFailed, match="is still there after it was removed"):
        stored.remove("data")
    proxy.answer = lambda method, path: None
    assert before.store.size((before / "manifest").key) is not None
    trees.rotate(stored, lambda _: None)
    assert before.store.names(before.key, re.compile(".*")) == []


def page(number: int, names: int, letters: int) -> bytes:
    """Of a listing, which says that another page follows."""
    rows = "".join(
        f"<CommonPrefixes><Prefix>{'a' * letters}/{number}-{one}/</Prefix></CommonPrefixes>"
        for one in range(names)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated>'
        f"<NextContinuationToken>{number}</NextContinuationToken>{rows}</ListBucketResult>"
    ).encode()


@pytest.mark.threat("V27")
def test_a_listing_whose_pages_do_not_end(
    stored: Vault, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is long. All of them were kept in memory until the request's time had passed."""
    seal(stored, tmp_path, b"1")
    monkeypatch.setattr(requests, "LARGEST_LISTING", 2 << 20)
    monkeypatch.setattr(requests, "OVERHEAD", 1 << 20)
    monkeypatch.setattr(requests, "SILENT_SECONDS", 20.0)
    numbers, sent = itertools.count(), [0]

    def endless(method: str, path: str) -> tuple[int, bytes] | None:
        if method != "GET" or "list-type" not in path:
            return None
        made = page(next(numbers), 100, 500)
        sent[0] += len(made)
        return 200, made

    proxy.answer = endless
    with pytest.raises(StoreFailed, match="the answers to one question have more than 3145728"):
        stored.find("data")
    assert sent[0] < 8 << 20
    proxy.answer = lambda method, path: None
    assert stored.find("data").manifest.object_version == 1


@pytest.mark.threat("V35")
def test_an_error_that_a_store_writes_steers_no_terminal(
    stored: Vault, proxy: Proxy, tmp_path: Path
) -> None:
    seal(stored, tmp_path, b"1")
    text = "\x9b2J" + "A" * 100_000
    document = f'<?xml version="1.0"?><Error><Code>Odd</Code><Message>{text}</Message></Error>'
    proxy.answer = lambda method, path: (400, document.encode()) if method == "GET" else None
    with pytest.raises(StoreFailed, match=r"calling the .* operation: \?2JA") as failed:
        stored.find("data")
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 500


def test_a_request_that_is_interrupted_does_not_go_on(
    stored: Vault, proxy: Proxy, tmp_path: Path
) -> None:
    """After Ctrl-C, an upload went on beside the removal of what was uploaded."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("/00000000"):
            signal.pthread_kill(main, signal.SIGINT)
            return "silent"
        return None

    proxy.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        seal(stored, tmp_path, b"1")
    proxy.fault = lambda method, path: None
    assert not asyncio.all_tasks(fsspec.filesystem("s3").loop)
    assert seal(stored, tmp_path, b"2") == 1


@pytest.mark.parametrize("lost", ["manifest", "00000000"])
@pytest.mark.threat("V37")
def test_a_store_that_does_not_keep_what_a_rotation_puts(
    lost: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy before was removed, and nothing was left of the object."""
    clear_memory_store()
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    vault = Vault.create("memory://lost", keys.key_file(key), "owner")
    seal(vault, tmp_path, b"1" * 100_000)
    real = {name: getattr(Store, name) for name in ("put", "upload")}

    def put(self: Store, path: str, content: bytes, *, new: bool) -> None:
        if not path.endswith(f"/{lost}"):
            real["put"](self, path, content, new=new)

    def upload(self: Store, source: int, path: str) -> None:
        if not path.endswith(f"/{lost}"):
            real["upload"](self, source, path)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", put)
        patch.setattr(Store, "upload", upload)
        with pytest.raises(StoreFailed if lost == "manifest" else MissingPart):
            trees.rotate(vault, lambda _: None)
    trees.open_object(vault.find("data"), tmp_path / "opened", lambda _: None)
    assert (tmp_path / "opened").read_bytes() == b"1" * 100_000
    assert trees.rotate(vault, lambda _: None).versions == 1
    trees.verify(vault.find("data"), lambda _: None)


@pytest.mark.parametrize("left_out", ["objects", "versions", "copies"])
@pytest.mark.parametrize("change", ["rotate", "rekey"])
@pytest.mark.threat("V34")
def test_a_key_change_while_a_listing_leaves_something_out(
    change: str, left_out: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that it had changed no version, and dropped the key that opens them."""
    clear_memory_store()
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    vault = Vault.create("memory://left-out", keys.key_file(key), "owner")
    seal(vault, tmp_path, b"1")
    real, depth = Store.names, {"objects": 1, "versions": 2, "copies": 3}[left_out]

    def names(self: Store, folder: str, form: re.Pattern[str]) -> list[str]:
        return [] if len(folder.split("/")) == depth else real(self, folder, form)

    def work() -> KeyChange:
        return vault.rekey() if change == "rekey" else trees.rotate(vault, lambda _: None)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "names", names)
        with pytest.raises(RolledBack, match="1 in all did not open and stay as they are"):
            work()
    trees.open_object(vault.find("data"), tmp_path / "opened", lambda _: None)
    assert (tmp_path / "opened").read_bytes() == b"1"
    assert work().versions == 1
    trees.verify(vault.find("data"), lambda _: None)
    # What is gone for good is removed by its name; then keys change without it.
    clear = [one for one in MemoryFileSystem.store if "/objects/" in one]
    for one in clear:
        del MemoryFileSystem.store[one]
    vault.remove("data")
    work()
