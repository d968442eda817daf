"""How many requests a load and a save take where a name has many versions in a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import NoSuchObject, RolledBack, StoreFailed
from sealring.vault import Vault, keys, objects, requests
from sealring.vault.objects import VERSION_NAME
from sealring.vault.stores import Store
from tests.vault.conftest import clear_memory_store
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.vault.test_store_faults import Proxy, proxy, stored
from tests.workers import SECRET

__all__ = ["proxy", "stored"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
URL = "memory://many"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """What the store was asked for."""
    clear_memory_store()
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    counts: Counter[str] = Counter()
    real = requests.ask

    def ask(files: Any, url: str, size: int, method: str, *args: Any, **options: Any) -> Any:
        counts[method] += 1
        return real(files, url, size, method, *args, **options)

    monkeypatch.setattr(requests, "ask", ask)
    return counts


def versions(vault: Vault, numbers: range, *, whole: bool = True) -> None:
    """Complete ones, or what killed saves leave."""
    for number in numbers:
        place = vault.folder_of("run") / f"{number:010}"
        copy = objects.new_copy(place, vault.ring, vault.header.vault, vault.header.suite)
        if whole:
            copy.commit("files", "run", [], "{}")


def counted(asked: Counter[str], work: Callable[[], object]) -> Counter[str]:
    asked.clear()
    work()
    return Counter(asked)


def opened(key: Path) -> Vault:
    """As another process opens it."""
    return Vault.open(URL, keys.key_file(key))


def test_requests_do_not_grow_with_versions(
    asked: Counter[str], key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault.create(URL, keys.key_file(key), "owner")
    there, found = 0, []
    for count in (10, 100, 1000):
        versions(vault, range(there + 1, count))
        save(vault, 1)
        loads = counted(asked, lambda: load(opened(key)))
        by_number = counted(asked, lambda: load(vault, version=count))  # noqa: B023
        (tmp_path / str(count)).mkdir()  # a ledger that knows no version
        with monkeypatch.context() as patch:
            patch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / str(count)))
            fresh = counted(asked, lambda: load(opened(key)))
        again = counted(asked, lambda: save(vault, 1))
        kept = counted(asked, lambda: save(vault, 1, keep=2000))
        first = counted(asked, lambda: save(opened(key), 1))
        there = count + 3
        found.append((loads, by_number, fresh, again, kept, first))
        assert same(load(vault), state(1))
        assert vault.find("run").manifest.object_version == there
    assert found[0] == found[1] == found[2]
    loads, by_number, fresh, again, kept, first = found[0]
    assert loads["find"] == by_number["find"] == fresh["find"] == again["find"] == 0
    assert first["find"] == 1  # a process that saves for the first time looks for what is left


def test_unfinished_versions_cost_a_listing(asked: Counter[str], key: Path) -> None:
    """Saves that were killed leave versions above the newest that is complete."""
    vault = Vault.create(URL, keys.key_file(key), "owner")
    save(vault, 1)
    found = []
    for numbers in (range(2, 12), range(12, 202)):
        versions(vault, numbers, whole=False)
        found.append(counted(asked, lambda: load(opened(key))))
        assert same(load(vault), state(1))
    assert found[0] == found[1]
    saved = counted(asked, lambda: save(opened(key), 2))
    assert saved["pipe_file"] == 3  # the first number that is free is known from the listing
    assert vault.find("run").manifest.object_version == 202
    save(opened(key), 3)  # removes all 200
    assert vault.incomplete("run") == []
    assert [int(one) for one in names(vault)] == [1, 202, 203]


def test_what_is_left_of_a_save_is_found_among_many(asked: Counter[str], key: Path) -> None:
    vault = Vault.create(URL, keys.key_file(key), "owner")
    versions(vault, range(1, 21))
    versions(vault, range(21, 22), whole=False)
    versions(vault, range(22, 41))
    asking = counted(asked, lambda: save(opened(key), 1))
    assert asking["find"] == 1
    assert [int(one) for one in names(vault)] == [*range(1, 21), *range(22, 42)]


def test_errors_name_what_is_there(asked: Counter[str], key: Path) -> None:
    """They cost a listing more, and not a request for each version."""
    vault = Vault.create(URL, keys.key_file(key), "owner")
    versions(vault, range(1, 20))
    save(vault, 1)
    versions(vault, range(21, 22), whole=False)
    listed = ", ".join(map(str, range(1, 21)))
    for number in (21, 22):
        with pytest.raises(NoSuchObject, match=f"no version {number} in .*: it has {listed}$"):
            opened(key).find("run", number)
    Store(URL).remove(f"{folder(vault)}/{20:010}")
    asked.clear()
    refused(lambda: load(opened(key)), RolledBack, "has version 19: an older copy")
    assert asked.total() < 30


def test_what_a_listing_leaves_out_is_not_removed(
    asked: Counter[str], key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing says what is there, and nothing of what it does not show."""
    vault = Vault.create(URL, keys.key_file(key), "owner")
    versions(vault, range(1, 9))
    real = requests.ask

    def without_two(files: Any, url: str, size: int, method: str, *args: Any, **more: Any) -> Any:
        found = real(files, url, size, method, *args, **more)
        return [one for one in found if f"{2:010}" not in one] if method == "find" else found

    monkeypatch.setattr(requests, "ask", without_two)
    assert opened(key).incomplete("run") == []
    save(opened(key), 1)
    assert asked["find"] > 0
    assert [int(one) for one in names(vault)] == list(range(1, 10))

    def empty(files: Any, url: str, size: int, method: str, *args: Any, **more: Any) -> Any:
        if method == "find":
            raise FileNotFoundError(args[0])
        return real(files, url, size, method, *args, **more)

    monkeypatch.setattr(requests, "ask", empty)
    with pytest.raises(StoreFailed, match="it lists no files in objects/"):
        opened(key).incomplete("run")
    save(opened(key), 2)
    assert [int(one) for one in names(vault)] == list(range(1, 11))


def test_a_folder_that_does_not_answer_is_an_error(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's own way to list all that is below a folder would leave it out."""
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path))
    place = tmp_path / "stored"
    place.mkdir()
    vault = Vault.create(place.as_uri(), keys.key_file(key), "owner")
    versions(vault, range(1, 8))
    real = requests.ask

    def one_is_gone(files: Any, url: str, size: int, method: str, *args: Any, **more: Any) -> Any:
        if method == "ls" and args[0].endswith(f"{2:010}"):
            raise TimeoutError("timed out")
        return real(files, url, size, method, *args, **more)

    monkeypatch.setattr(requests, "ask", one_is_gone)
    with pytest.raises(StoreFailed, match="timed out"):
        vault.incomplete("run")


def names(vault: Vault) -> list[str]:
    return [one.name for one in vault.folder_of("run").entries(VERSION_NAME)]


def folder(vault: Vault) -> str:
    return str(vault.folder_of("run")).removeprefix(f"{vault.path}/")


def test_requests_over_http(stored: Vault, proxy: Proxy, key: Path) -> None:
    """As S3 counts them, where a listing comes in pages of three."""
    proxy.rewrite = lambda path: f"{path}&max-keys=3" if "list-type" in path else path
    came: Counter[str] = Counter()

    def count(method: str, path: str) -> None:
        if "list-type" in path:
            prefix = "" if "delimiter=%2F" in path else "all below "
            came[f"{prefix}{'next page' if 'continuation-token' in path else 'listing'}"] += 1
        else:
            came[method] += 1

    proxy.fault = count
    there, found = 0, []
    for number in (5, 29):
        versions(stored, range(there + 1, number))
        save(stored, number)
        came.clear()
        assert same(load(Vault.open(str(stored.path), keys.key_file(key))), state(number))
        loads = Counter(came)
        save(stored, number + 1)
        came.clear()
        save(stored, number + 2)
        found.append((loads, Counter(came)))
        there = number + 2
    for before, after in zip(*found, strict=True):
        for pages in (before, after):
            # 31 versions have 8 pages more than 7, each time that they are listed.
            assert pages.pop("next page") <= 11 * pages["listing"]
        assert before == after
        assert before["all below listing"] == 0
