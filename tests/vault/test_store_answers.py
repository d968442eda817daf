"""Answers of a store that contradict each other, and files that change between two requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sealring.errors import MissingPart, NotAVault, StoreFailed, VaultError
from sealring.vault import Vault, keys, requests
from sealring.vault.stores import Store
from tests.codes import coded
from tests.vault.conftest import clear_memory_store
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.vault.test_store_faults import Proxy, once, proxy, stored
from tests.workers import SECRET

__all__ = ["proxy", "stored"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
URL = "memory://answers"


@pytest.fixture
def in_memory(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    clear_memory_store()
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    return Vault.create(URL, keys.key_file(key), "owner")


def between(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], object], *, range_from: int = 0
) -> None:
    """Something happens to a file after its size was told, and before it is read."""
    real = Store.read_range
    left = [change]

    def read_range(self: Store, path: str, start: int, end: int) -> bytes:
        if path.endswith(name) and start >= range_from and left:
            left.pop()()
        return real(self, path, start, end)

    monkeypatch.setattr(Store, "read_range", read_range)


@pytest.mark.parametrize("part", ["rank-00000", "rank-00000.digests"])
@pytest.mark.threat("V31")
def test_a_version_that_is_removed_while_it_is_read(
    part: str, in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(in_memory, 1)
    folder = in_memory.find("run").copy.folder
    between(monkeypatch, part, lambda: in_memory.remove_version(folder.parent), range_from=1)
    refused(lambda: load(in_memory), MissingPart, f"part {part} of 'run' version 1 is missing")


@pytest.mark.parametrize("name", ["vault.json", "key.json", "manifest"])
@pytest.mark.threat("V31")
def test_a_small_file_that_is_removed_before_it_is_read(
    name: str, in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(in_memory, 1)
    gone = [one for one in MemoryFileSystem.store if one.endswith(f"/{name}")]
    between(monkeypatch, name, lambda: [MemoryFileSystem.store.pop(one) for one in gone])
    refused(lambda: load(in_memory), NotAVault, "cannot be read: No such file")


@pytest.mark.threat("V31")
def test_a_header_that_is_replaced_by_a_longer_one_before_it_is_read(
    in_memory: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read as long as the one before, and was NotAVault."""
    other = tmp_path / "other.key"
    keys.make_key_file(other)
    between(monkeypatch, "vault.json", lambda: in_memory.grant("other", keys.key_file(other)))
    opened = Vault.open(URL, keys.key_file(key))
    assert [one.name for one in opened.header.grants] == ["owner", "other"]


@pytest.mark.parametrize("name", ["key.json", "manifest"])
@pytest.mark.threat("V27")
def test_an_answer_that_is_cut_hides_no_newer_checkpoint(
    name: str, in_memory: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a length that fits what is left of it, as a proxy may send it."""
    save(in_memory, 1)
    save(in_memory, 2)
    newest = str(in_memory.find("run").copy.folder).removeprefix(f"{in_memory.path}/")
    (tmp_path / "fresh").mkdir()  # a ledger that knows neither
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "fresh"))
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        came = bytes(real(self, path, start, end, **options))
        return came[: len(came) // 2] if path.endswith(f"{newest}/{name}") else came

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    refused(
        lambda: load(Vault.open(URL, keys.key_file(key))), StoreFailed, "other bytes than the store"
    )


@pytest.mark.threat("V27")
def test_a_success_of_s3_without_the_file_hides_no_newer_checkpoint(
    stored: Vault, proxy: Proxy, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes it for an empty file, so the older version was loaded."""
    save(stored, 1)
    save(stored, 2)
    (tmp_path / "fresh").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "fresh"))

    def answer(method: str, path: str) -> tuple[int, bytes] | None:
        newest = "/0000000002/" in path and urlsplit(path).path.endswith("/manifest")
        return (204, b"") if newest else None

    proxy.answer = answer
    refused(lambda: load(Vault.open(stored.path, keys.key_file(key))), StoreFailed, "answers 204")
    proxy.answer = lambda method, path: None
    assert same(load(Vault.open(stored.path, keys.key_file(key))), state(2))


@pytest.mark.parametrize("name", ["key.json", "manifest"])
def test_empty_files_of_an_attacker_hide_no_genuine_version(
    name: str, in_memory: Vault, key: Path
) -> None:
    save(in_memory, 1)
    genuine = str(in_memory.find("run").copy.folder).removeprefix(f"{in_memory.path}/")
    store = Store(URL)
    above = genuine.replace("/0000000001/", "/0000000009/")
    for one in ("key.json", "manifest"):
        store.put(f"{above}/{one}", store.read_range(f"{genuine}/{one}", 0, 1 << 20), new=True)
    store.put(f"{above}/{name}", b"", new=False)
    assert same(load(Vault.open(URL, keys.key_file(key))), state(1))


@pytest.mark.threat("V39")
def test_a_store_that_says_of_every_number_that_it_is_taken(
    in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save tried all ten thousand million of them."""
    save(in_memory, 1)
    real = Store.put

    def put(self: Store, path: str, content: bytes, *, new: bool) -> None:
        if new:
            raise FileExistsError(path)
        real(self, path, content, new=new)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", put)
        refused(lambda: save(in_memory, 2), VaultError, "'run' gets no number")
    assert same(load(in_memory), state(1))


def test_a_store_that_does_not_say_which_condition_failed(stored: Vault, proxy: Proxy) -> None:
    """AWS does, and s3fs knows it by that alone. Another writer took the number first."""
    save(stored, 1)
    proxy.fault = once("failed condition", "PUT", "/taken$")
    save(stored, 2)
    assert same(load(stored), state(2))
    assert stored.find("run").manifest.object_version == 3


@pytest.mark.threat("V37")
def test_a_manifest_that_the_store_takes_and_does_not_have(
    in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save went well, and removed the checkpoint before it."""
    save(in_memory, 1)
    real = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> Any:
        return None if path.endswith("/manifest") else real(self, path, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        refused(lambda: save(in_memory, 2, keep=1), StoreFailed, "the store said that it was put")
    assert same(load(in_memory), state(1))


def test_two_processes_that_make_one_vault(
    in_memory: Vault, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has looked before the other has written."""
    before = Store(URL).read_range("vault.json", 0, 1 << 20)
    monkeypatch.setattr("sealring.vault.stores.StorePath.has_folder", lambda self: False)
    with pytest.raises(VaultError, match="is there already", check=coded("vault.output_exists")):
        Vault.create(URL, keys.key_file(key), "owner")
    assert Store(URL).read_range("vault.json", 0, 1 << 20) == before


def test_a_bucket_that_is_gone_in_the_middle_of_a_save(
    stored: Vault, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts find no bucket, and the question whether it is there has no answer."""
    save(stored, 1)

    def gone(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("/key.json"):
            return "missing"
        return "silent" if silent and method == "HEAD" and re.fullmatch("/bucket/?", path) else None

    silent = False
    proxy.fault = gone
    refused(lambda: save(stored, 2), StoreFailed, "key.json cannot be put")
    silent = True
    monkeypatch.setattr(requests, "SILENT_SECONDS", 1.0)
    refused(lambda: save(stored, 2), StoreFailed, "did not answer within 1 seconds")
    proxy.fault = lambda method, path: None
    assert same(load(stored), state(1))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/vault.json$"),
        ("GET", "/key.json$"),
        ("GET", "/rank-00000$"),
        ("GET", "list-type"),
        ("PUT", "/key.json$"),
    ],
)
@pytest.mark.threat("V27")
def test_an_answer_that_does_not_end(
    method: str, path: str, stored: Vault, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of it were collected in memory until the request's time had passed."""
    save(stored, 1)
    monkeypatch.setattr(requests, "OVERHEAD", 1 << 20)

    def endless(came: str, where: str) -> str | None:
        return "endless" if came == method and re.search(path, where) else None

    proxy.fault = endless
    action = (lambda: save(stored, 2)) if method == "PUT" else (lambda: load(stored))
    refused(action, StoreFailed, "an answer has more than")
    # Listings are asked for again; and what is in the buffers of both ends was sent as well.
    assert proxy.sent < 200 << 20
    proxy.fault = lambda method, path: None
    assert same(load(stored), state(1))


@pytest.mark.threat("V32")
def test_names_in_a_listing_of_s3_that_lead_elsewhere(stored: Vault, proxy: Proxy) -> None:
    """Only names of the vault's own form are used, below the vault's folder. NUL comes as %00."""
    save(stored, 1)
    above = urlsplit(str(stored.folder_of("run"))).path.strip("/")
    tricks = [
        "../../etc/", "/etc/", "..%2F0000000009/", "0000000009%00/", "0000000009%0A/", "A" * 9000,
        "0000000001/", "0000000001/", "%D9%A0" * 10 + "/", "0000000009", "-000000009/", "/",
    ]  # fmt: skip
    names = [f"{above}/{one}" for one in tricks] + ["/etc/passwd", "..", "0000000009/", "", "/"]
    prefixes = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in names)
    files = "".join(f"<Contents><Key>{one}</Key><Size>-1</Size></Contents>" for one in names)
    page = f"<ListBucketResult><EncodingType>url</EncodingType>{prefixes}{files}</ListBucketResult>"
    asked: list[str] = []
    served: list[str] = []

    def answer(method: str, path: str) -> tuple[int, bytes] | None:
        asked.append(unquote(path))
        if "list-type=2" not in path or f"prefix={above}/&" not in asked[-1]:
            return None
        served.append(path)
        return 200, page.encode()

    proxy.answer = answer
    assert same(load(stored), state(1))
    assert all(".." not in one and "\0" not in one and "/etc" not in one for one in asked)
    stored.incomplete("run")
    assert len(served) > 1
