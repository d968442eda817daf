"""A revoked holder of a vault's key keeps everything that it could compute before."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    NotAVault,
    RolledBack,
    TamperedChunk,
    VaultError,
    WrongKey,
)
from sealring.vault import Vault, keys, objects, trees
from sealring.vault import header as headers
from sealring.vault.datasets.building import ingest
from sealring.vault.datasets.formats import Limits
from sealring.vault.datasets.work import Task, in_this_process
from sealring.vault.keys import Grant
from sealring.vault.sealed import AES, Place, Progress
from sealring.vault.storage import LocalPath
from tests.codes import coded
from tests.vault import slow
from tests.vault.datasets.made import json_lines, sealed


def nothing(count: int) -> None:
    """A progress callback that does nothing."""


def put(vault: Vault, folder: Path, name: str, text: str) -> None:
    (folder / "source").write_text(text)
    trees.seal_path(vault, folder / "source", name, None, nothing)


class Hoarder:
    """A holder that tries every key that it ever got from the headers that it has seen."""

    may_write = True

    def __init__(self, known: list[_native.Secret]) -> None:
        self.known = known

    def unwrap(self, vault: bytes, number: int, grant: Grant) -> _native.Secret | None:
        for secret in self.known:
            found = _native.unwrap_key(secret, bytes.fromhex(grant.wrapped))
            if found is not None:
                return found
        return None


def unwrapped_from(text: str, ring: headers.KeyRing) -> list[_native.Secret]:
    """Returns everything in a header that the vault's keys can unwrap."""
    found: list[_native.Secret] = []

    def search(value: Any) -> None:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                search(inner)
            elif isinstance(inner, str):
                try:
                    wrapped = bytes.fromhex(inner)
                except ValueError:
                    continue
                opened = (_native.unwrap_key(one, wrapped) for one in [*ring.keys.values()])
                found.extend(one for one in opened if one is not None)

    search(json.loads(text))
    return found


@pytest.mark.parametrize("change", ["revoke", "rotate"])
@pytest.mark.threat("V17")
def test_nothing_in_a_header_that_a_holder_kept_opens_a_later_one(
    change: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    alice = keys.make_identity(tmp_path / "alice")
    vault.grant("alice", keys.PublicKey(alice.public))
    put(vault, tmp_path, "data", "before")
    as_alice = Vault.open(vault.path, alice)
    kept = [*as_alice.ring.keys.values(), as_alice.ring.names]
    kept += unwrapped_from((vault.path / "vault.json").local.read_text(), as_alice.ring)
    assert len(kept) > 2  # it also finds the key of the names in the header
    vault.revoke("alice")
    if change == "rotate":
        trees.rotate(vault, nothing)
    put(vault, tmp_path, "data", "after")
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, alice)
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, Hoarder(kept))


@pytest.mark.parametrize("change", ["revoke", "a damaged object", "rotate"])
@pytest.mark.threat("V17")
def test_an_ingest_that_was_killed_does_not_go_on_under_a_key_that_a_revoked_holder_knows(
    change: str, vault: Vault, tmp_path: Path
) -> None:
    keys.make_key_file(tmp_path / "bob")
    vault.grant("bob", keys.key_file(tmp_path / "bob"))
    put(vault, tmp_path, "other", "text")
    (other,) = (vault.path / "objects").local.glob("*/*/*")
    source = json_lines(tmp_path / "lines")

    def killed(tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]:
        yield from itertools.islice(in_this_process(tasks, progress), 2)
        raise KeyboardInterrupt  # two shards and their receipts are written by now

    with pytest.raises(KeyboardInterrupt):
        ingest(vault, source, "data", killed, limits=Limits(500, 1 << 20))
    (unfinished,) = {one.parent for one in (vault.path / "objects").local.glob("*/*/*/*.receipt")}
    bob = Vault.open(vault.path, keys.key_file(tmp_path / "bob"))
    kept = objects.open_copy(LocalPath(unfinished), bob.ring, bob.header.vault)
    if change == "a damaged object":
        (other / "key.json").write_text("{}")
        with pytest.raises(NotAVault):  # so the vault keeps its older keys
            vault.revoke("bob")
    else:
        vault.revoke("bob")
    if change == "rotate":
        trees.rotate(vault, nothing)
    sealed(vault, source)
    made = vault.find("data")
    copy = dataclasses.replace(kept, folder=made.copy.folder)
    with pytest.raises(ForeignPart):
        copy.manifest()
    with pytest.raises(ForeignPart), copy.opened(made.manifest.parts[0], made.whose):
        pass
    assert not unfinished.exists()


@pytest.mark.threat("V17")
def test_holders_whose_secrets_are_not_presented_are_dropped_and_named(
    vault: Vault, tmp_path: Path
) -> None:
    """The vault's key alone cannot wrap the next key for a key file or for a broker."""
    for name in ("second", "third"):
        keys.make_key_file(tmp_path / name)
    second, third = (keys.key_file(tmp_path / name) for name in ("second", "third"))
    worker = keys.broker_key("gpt/key/vault", _native.Secret.random(32))
    vault.grant("second", second)
    vault.grant("third", third)
    vault.grant("workers", worker)
    changes: list[Callable[[], Any]] = [
        lambda: vault.rekey([third, worker]),
        lambda: trees.rotate(vault, nothing, [worker]),
        lambda: vault.rekey(),
    ]
    for change, dropped in zip(changes, ("second", "third", "workers"), strict=True):
        assert change().dropped == [dropped]
    for holder in (second, third, worker):
        with pytest.raises(VaultError, check=coded("vault.not_granted")):
            Vault.open(vault.path, holder)
    vault.grant("second", second)
    assert Vault.open(vault.path, second).header.key == 4


@pytest.mark.parametrize("presented", [False, True])
@pytest.mark.threat("V18")
def test_a_holder_exchanges_anothers_public_key_before_it_is_revoked(
    presented: bool, vault: Vault, key: Path, tmp_path: Path
) -> None:
    """The header looks unchanged, because both people can still open the vault."""
    bob, other = (keys.make_identity(tmp_path / name) for name in ("bob", "other"))
    vault.grant("bob", keys.PublicKey(bob.public))
    keys.make_key_file(tmp_path / "second")
    vault.grant("second", keys.key_file(tmp_path / "second"))
    holder = Vault.open(vault.path, keys.key_file(tmp_path / "second"))
    grants = [
        dataclasses.replace(one, public=other.public) if one.name == "bob" else one
        for one in holder.header.grants
    ]
    changed = headers.changed(holder.header, holder.ring, grants=grants)
    (holder.path / "vault.json").write(headers.write_header(changed))
    Vault.open(vault.path, bob)
    owner = Vault.open(vault.path, keys.key_file(key))
    also = [keys.PublicKey(bob.public)] if presented else []
    assert owner.revoke("second", also).dropped == ["bob"]
    for person in (other, bob):
        with pytest.raises(VaultError, check=coded("vault.not_granted")):
            Vault.open(vault.path, person)


@pytest.mark.threat("V18")
def test_people_who_are_presented_keep_their_grants(vault: Vault, tmp_path: Path) -> None:
    bob, carol = (keys.make_identity(tmp_path / name) for name in ("bob", "carol"))
    for name, one in (("bob", bob), ("carol", carol)):
        vault.grant(name, keys.PublicKey(one.public))
    assert vault.rekey([keys.PublicKey(bob.public)]).dropped == ["carol"]
    assert Vault.open(vault.path, bob).header.key == 2
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, carol)


@pytest.mark.threat("V22")
def test_a_header_by_a_revoked_holder_with_a_later_number(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    """A revoked holder knows the older key and its grants, so it can compute a header's MAC."""
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    vault.grant("second", second)
    before = headers.read_header((vault.path / "vault.json").local.read_bytes(), "it")
    ring = Vault.open(vault.path, second).ring
    vault.revoke("second")
    forged = headers.changed(dataclasses.replace(before, generation=99), ring)
    (vault.path / "vault.json").local.write_bytes(headers.write_header(forged))
    with pytest.raises(RolledBack, match=r"with key 1.*has recorded number 5 with key 2"):
        Vault.open(vault.path, keys.key_file(key))
    # With a later key number the owner's grant does not open, since the number is bound into it.
    forged = headers.changed(dataclasses.replace(before, key=7), ring)
    (vault.path / "vault.json").local.write_bytes(headers.write_header(forged))
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, keys.key_file(key))


@pytest.mark.threat("V11")
def test_an_older_header_under_a_vault_that_is_open(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a running job would seal for the revoked holder again."""
    keys.make_key_file(tmp_path / "second")
    vault.grant("second", keys.key_file(tmp_path / "second"))
    old = (vault.path / "vault.json").local.read_bytes()
    vault.revoke("second")
    job = Vault.open(vault.path, keys.key_file(key))
    (vault.path / "ledger.json").local.unlink()
    (vault.path / "vault.json").local.write_bytes(old)
    with pytest.raises(RolledBack, match="this process has seen"):
        put(job, tmp_path, "data", "secret")
    with pytest.raises(RolledBack):
        job.grant("third", keys.key_file(tmp_path / "second"))


@pytest.mark.threat("V23")
def test_another_vault_under_a_path_that_is_open_or_expected(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    with pytest.raises(
        VaultError, match=f"holds the vault {other.header.id}", check=coded("vault.foreign")
    ):
        Vault.open(other.path, keys.key_file(key), expect=vault.header.id)
    vault.path.local.rename(tmp_path / "moved")
    other.path.local.rename(vault.path.local)
    with pytest.raises(VaultError, check=coded("vault.foreign")):
        put(vault, tmp_path, "data", "secret")


@pytest.mark.threat("V24")
def test_one_objects_key_opens_no_other_object(vault: Vault, key: Path, tmp_path: Path) -> None:
    """The attacker copies one object's wrapped key to another object and seals files under it."""
    put(vault, tmp_path, "mine", "x")
    put(vault, tmp_path, "model", "the genuine model")
    mine, model = vault.find("mine").copy, vault.find("model").copy
    folder = model.folder.local.parents[1] / "0000000002" / "deadbeef"
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes((mine.folder / "key.json").local.read_bytes())
    place = Place(vault.header.vault, model.place.object, 2, AES, mine.place.key)
    forged = objects.Copy(LocalPath(folder), place, 1)
    part = forged.write_part("00000000", b"another model")
    files = [{"path": "", "part": "00000000", "executable": False}]
    content = json.dumps({"tree": False, "files": files, "folders": []})
    forged.commit("files", "model", [part], content)
    opened = Vault.open(vault.path, keys.key_file(key))
    with pytest.raises(ForeignPart, match="for this object and version"):
        opened.find("model", 2)
    assert opened.find("model").manifest.object_version == 1


@pytest.mark.threat("V24", "P7")
def test_the_key_of_one_part_opens_no_other_part(vault: Vault, tmp_path: Path) -> None:
    """A helper process gets only the key of one part."""
    put(vault, tmp_path, "data", "x" * 100)
    place = vault.find("data").copy.place
    taken = place.part_key("00000000")
    assert taken != place.part_key("manifest")
    copy = vault.find("data").copy
    with_taken = dataclasses.replace(place, key=taken)
    with pytest.raises(WrongKey):
        with_taken.open("manifest", (copy.folder / "manifest").local.read_bytes(), "it")
    context = place.context("manifest")
    sealed = (copy.folder / "manifest").local.read_bytes()
    with pytest.raises(WrongKey):
        _native.SealedFileReader(
            lambda at, size: sealed[at : at + size], taken, AES, context, "it", 1, len(sealed)
        )


def test_a_grant_from_a_process_that_has_not_seen_the_next_key(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    """The grant must wrap the newest key: an older wrapped key could not be renewed later."""
    late = Vault.open(vault.path, keys.key_file(key))
    vault.rekey()
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    late.grant("second", second)
    assert Vault.open(vault.path, second).header.key == 2
    assert vault.rekey([second]).dropped == []
    assert Vault.open(vault.path, second).header.key == 3


# ---- what was sealed before ----------------------------------------------------------------------


def opened_text(vault: Vault, folder: Path, version: int | None = None) -> str:
    out = folder / f"out-{len(list(folder.iterdir()))}"
    trees.open_object(vault.find("data", version), out, nothing)
    return out.read_text()


def kept_by_a_revoked_holder(vault: Vault, folder: Path) -> objects.Copy:
    """Revokes a holder that has kept an object's key; revoking re-wraps that key unchanged."""
    keys.make_key_file(folder / "second")
    second = keys.key_file(folder / "second")
    vault.grant("second", second)
    copy = Vault.open(vault.path, second).find("data").copy
    vault.revoke("second")
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, second)
    return copy


@pytest.mark.parametrize("wanted", [None, 1])
@pytest.mark.threat("V20")
def test_a_revoked_holder_changes_what_was_sealed_before(
    wanted: int | None, vault: Vault, key: Path, tmp_path: Path
) -> None:
    put(vault, tmp_path, "data", "good code")
    copy = kept_by_a_revoked_holder(vault, tmp_path)
    manifest = copy.manifest()
    (copy.folder / manifest.parts[0].name).local.unlink()
    part = copy.write_part(manifest.parts[0].name, b"evil code")
    copy.commit("files", "data", [part], manifest.content)
    owner = Vault.open(vault.path, keys.key_file(key))
    with pytest.raises(RolledBack, match="'data' version 1 has another content"):
        opened_text(owner, tmp_path, wanted)
    # Rotation must not seal the changed content under the new key, where it would look genuine.
    with pytest.raises(RolledBack, match="1 in all did not open"):
        trees.rotate(owner, nothing)
    with pytest.raises(RolledBack):
        opened_text(Vault.open(vault.path, keys.key_file(key)), tmp_path, wanted)


@pytest.mark.parametrize("action", ["open", "verify", "rotate"])
@pytest.mark.threat("V20")
def test_a_revoked_holder_changes_bytes_under_the_same_commitment(
    action: str, vault: Vault, tmp_path: Path
) -> None:
    """The manifest stays unchanged: the new file has the same salt, length and key."""
    put(vault, tmp_path, "data", "good code")
    copy = kept_by_a_revoked_holder(vault, tmp_path)
    name = "00000000"
    path, place = copy.folder / name, copy.place
    salt = path.local.read_bytes()[:24]
    sealed = slow.seal(
        bytes(place.part_key(name)), place.suite, salt, place.context(name), b"evil code"
    )
    path.local.write_bytes(sealed)
    actions: dict[str, Callable[[], Any]] = {
        "open": lambda: opened_text(vault, tmp_path),
        "verify": lambda: trees.verify(vault.find("data"), nothing),
        "rotate": lambda: trees.rotate(vault, nothing),
    }
    with pytest.raises(TamperedChunk, match="part 00000000 of 'data' version 1 holds other bytes"):
        actions[action]()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.threat("V21")
def test_another_copys_version_under_a_number_that_the_ledger_knows(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored backup went on separately, so its version 2 is genuine but has other content."""
    put(vault, tmp_path, "data", "one")
    shutil.copytree(vault.path.local, tmp_path / "backup")
    put(vault, tmp_path, "data", "two")
    put(Vault.open(tmp_path / "backup", keys.key_file(key)), tmp_path, "data", "two of the other")
    for folder in (vault.path / "objects").local.iterdir():
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup" / "objects" / folder.name, folder)
    for version in (None, 2):
        with pytest.raises(RolledBack, match="'data' version 2 has another content"):
            opened_text(vault, tmp_path, version)
    assert opened_text(vault, tmp_path, 1) == "one"


@pytest.mark.parametrize("name", ["00000000", "ffffffff"])
@pytest.mark.threat("V21")
def test_another_copys_version_beside_the_one_that_the_ledger_knows(
    name: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    """The other version must neither hide the right one, whatever its name, nor replace it."""
    put(vault, tmp_path, "data", "one")
    shutil.copytree(vault.path.local, tmp_path / "backup")
    put(vault, tmp_path, "data", "two")
    backup = Vault.open(tmp_path / "backup", keys.key_file(key))
    put(backup, tmp_path, "data", "two of the other")
    right = vault.find("data").copy.folder
    shutil.copytree(backup.find("data").copy.folder.local, right.local.with_name(name))
    for version in (None, 2):
        assert opened_text(vault, tmp_path, version) == "two"
    trees.rotate(vault, nothing)
    assert opened_text(vault, tmp_path) == "two"
    shutil.rmtree(vault.find("data").copy.folder.local)
    with pytest.raises(RolledBack):
        opened_text(vault, tmp_path)


@pytest.mark.parametrize("length", [0, 1, 16384, (8 << 20) - 1, 8 << 20, (8 << 20) + 16384])
@pytest.mark.threat("V20")
def test_digests_of_every_length(length: int, vault: Vault, tmp_path: Path) -> None:
    """A reader computes the digests block by block; a writer computes them all at once."""
    put(vault, tmp_path, "data", "x" * length)
    assert len(opened_text(vault, tmp_path)) == length
    trees.rotate(vault, nothing)
    trees.verify(vault.find("data"), nothing)


# ---- a ledger of another reader ------------------------------------------------------------------


@pytest.mark.threat("V11")
def test_a_reader_that_saw_the_revocation_accepts_no_header_from_before_it(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This reader never writes the vault; its own ledger learns of the new key when it reads."""
    put(vault, tmp_path, "data", "one")
    keys.make_key_file(tmp_path / "second")
    vault.grant("second", keys.key_file(tmp_path / "second"))
    before = (vault.path / "vault.json").local.read_bytes()
    (tmp_path / "ledgers").mkdir()

    def as_reader() -> Vault:
        with monkeypatch.context() as patch:
            patch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
            return Vault.open(vault.path, keys.key_file(key))

    assert opened_text(as_reader(), tmp_path) == "one"
    vault.revoke("second")
    assert as_reader().ledger.state() == (vault.header.key, vault.header.generation)
    (vault.path / "vault.json").local.write_bytes(before)
    with pytest.raises(RolledBack, match="with key 1"):
        as_reader()


@pytest.mark.threat("V22")
def test_a_forged_generation_does_not_keep_the_next_key_out(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    """A revoked holder first shows a header under the older key with a very large number."""
    late = Vault.open(vault.path, keys.key_file(key))
    forged = headers.changed(dataclasses.replace(late.header, generation=10**9), late.ring)
    genuine = (vault.path / "vault.json").local.read_bytes()
    (vault.path / "vault.json").local.write_bytes(headers.write_header(forged))
    late.refresh()
    assert late.ledger.state() == (1, 10**9 + 1)
    (vault.path / "vault.json").local.write_bytes(genuine)
    (vault.path / "ledger.json").local.rename(tmp_path / "ledger")
    Vault.open(vault.path, keys.key_file(key)).rekey()
    (tmp_path / "ledger").rename((vault.path / "ledger.json").local)
    late.refresh()
    assert late.header.key == 2
    assert late.ledger.state() == (2, late.header.generation)


@pytest.mark.threat("V8")
def test_a_vault_made_for_a_persons_public_key_does_not_change_the_ledger(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forged vault has the real vault's id, and numbers that no real header reaches."""
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    alice = keys.make_identity(tmp_path / "alice")
    owner = Vault.open(vault.path, keys.key_file(key))
    put(owner, tmp_path, "data", "genuine")
    owner.grant("alice", keys.PublicKey(alice.public))
    state = owner.ledger.state()
    keys.make_key_file(tmp_path / "attackers.key")
    monkeypatch.delenv("SEALRING_VAULT_LEDGER")
    forged = Vault.create(tmp_path / "forged", keys.key_file(tmp_path / "attackers.key"), "x")
    number = 1 << 40
    grant = keys.PublicKey(alice.public).grant("a", owner.header.vault, number, forged.ring.key)
    header = dataclasses.replace(
        forged.header, id=owner.header.id, key=number, generation=number, grants=[grant]
    )
    (forged.path / "vault.json").local.write_bytes(
        headers.write_header(headers.changed(header, forged.ring))
    )
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    Vault.open(forged.path, alice)
    assert Vault.open(vault.path, keys.key_file(key)).ledger.state() == state
    assert opened_text(Vault.open(vault.path, alice), tmp_path) == "genuine"


@pytest.mark.threat("V9")
def test_a_holder_is_not_granted_twice(vault: Vault, tmp_path: Path) -> None:
    """A second grant would still open the vault after the first one was revoked."""
    alice = keys.PublicKey(keys.make_identity(tmp_path / "alice").public)
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    for name, holder in (("alice", alice), ("second", second)):
        vault.grant(name, holder)
        with pytest.raises(ConfigurationError, match=f"has the grant '{name}' already"):
            vault.grant("again", holder)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_key_of_the_holders_own_among_the_older_ones(
    ahead: int, vault: Vault, key: Path, tmp_path: Path
) -> None:
    # A planted key with the number of the current or the next key would be used as that key.
    planted = _native.wrap_key(vault.ring.key, _native.Secret.random(32)).hex()
    older = [headers.OlderKey(vault.header.key + ahead, planted)]
    made = headers.changed(vault.header, vault.ring, older=older)
    (vault.path / "vault.json").local.write_bytes(headers.write_header(made))
    with pytest.raises(NotAVault, match="its older keys are not older than its key"):
        Vault.open(vault.path, keys.key_file(key))


def test_an_older_key_that_is_listed_twice(vault: Vault, key: Path) -> None:
    vault.rekey()
    planted = _native.wrap_key(vault.ring.key, _native.Secret.random(32)).hex()
    made = headers.changed(vault.header, vault.ring, older=[headers.OlderKey(1, planted)] * 2)
    (vault.path / "vault.json").local.write_bytes(headers.write_header(made))
    with pytest.raises(NotAVault, match="its older keys are not older than its key"):
        Vault.open(vault.path, keys.key_file(key))
