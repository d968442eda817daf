"""A log on disk is appended to, proved, and damaged in every way that has a name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.errors import (
    ConfigurationError,
    ForgedStatement,
    ForkedLog,
    LogError,
    NotALog,
    TamperedLog,
)
from sealring.formats import files
from sealring.formats.log import folder, tree
from sealring.formats.log.checkpoints import open_checkpoint, parse_checkpoint
from sealring.formats.log.folder import LogWriter, StoredTree, create_log
from sealring.formats.log.notes import SignatureKind, Signer, parse_note
from sealring.formats.log.policy import Log, LogPolicy
from tests.codes import coded
from tests.record.statements import slow
from tests.record.statements.logs import ORIGIN, LocalLog, new_log, numbered, signed_note


def test_names_of_tiles_are_those_of_the_specification() -> None:
    assert tree.tile_path(0, 1234067) == "tile/0/x001/x234/067"
    assert tree.tile_path("entries", 7, 12) == "tile/entries/007.p/12"
    assert tree.tile_path(3, 1000) == "tile/3/x001/000"
    # From c2sp.org/tlog-tiles: a tree of 70,000 and one of 256.
    assert list(tree.right_edge(70_000)) == [(0, 273, 112), (1, 1, 17), (2, 0, 1)]
    assert list(tree.right_edge(256)) == [(0, 1, 0), (1, 0, 1)]


def test_a_tree_of_the_specifications_example_on_disk(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(513))
    found = sorted(
        str(path.relative_to(log.folder / "tile"))
        for path in (log.folder / "tile").rglob("*")
        if path.is_file()
    )
    assert found == [
        "0/000", "0/001", "0/002.p/1", "1/000.p/2",
        "entries/000", "entries/001", "entries/002.p/1",
    ]  # fmt: skip
    assert (log.folder / "tile/0/000").stat().st_size == 8192


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_batches_of_any_size_give_the_tree_of_the_definition(
    tmp_path: Path, batches: list[int]
) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    log = new_log(tmp_path)
    written: list[bytes] = []
    for count in batches:
        more = numbered(count, len(written))
        assert log.append(more) == range(len(written), len(written) + count)
        written += more
    signed = log.opened()
    assert (signed.size, signed.root) == (len(written), slow.mth(written))
    assert log.check() == len(written)
    assert log.entries() == written
    stored = log.tree()
    for index in {0, len(written) // 2, len(written) - 1} if written else set():
        assert stored.entry(index, signed.root) == written[index]
        assert stored.inclusion_proof(index, signed.root) == slow.path(index, written)
    for old in {1, len(written) // 3, len(written)} - {0} if written else set():
        before, proof = stored.consistency_proof(old, signed.root)
        assert (before, proof) == (slow.mth(written[:old]), slow.proof(old, written))


def test_entries_of_every_length_and_one_too_long(tmp_path: Path) -> None:
    log = new_log(tmp_path, [b"", b"x", b"y" * 65535])
    assert log.entries() == [b"", b"x", b"y" * 65535]
    with log.writer() as writer:
        with pytest.raises(ConfigurationError, match="at most 65535"):
            writer.append([b"first", b"z" * 65536])
        assert writer.append([b"next"]) == range(3, 4)
    assert log.check() == 4
    assert log.entries()[3] == b"next"
    with pytest.raises(TamperedLog, match="no entry 4", check=coded("log.not_included")):
        log.tree().entry(4, log.opened().root)


def test_a_second_writer_is_refused_and_the_lock_ends_with_the_first(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    with log.writer(), pytest.raises(LogError, check=coded("log.in_use")):
        log.append([b"second"])
    assert log.append([b"first"]) == range(1)


def test_a_reader_of_an_older_checkpoint_goes_on_when_partial_tiles_are_gone(
    tmp_path: Path,
) -> None:
    log = new_log(tmp_path, numbered(200))
    old = log.opened()
    log.append(numbered(100, 200))
    assert not (log.folder / "tile/0/000.p").exists()
    stored = StoredTree(log.folder, old.size)
    stored.check_all(old.root)
    assert stored.entry(199, old.root) == b"entry 199"


def each_file(log: LocalLog) -> list[Path]:
    return sorted(path for path in (log.folder / "tile").rglob("*") if path.is_file())


@pytest.mark.threat("L1")
def test_every_file_changed_in_turn_is_noticed(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(600))
    assert len(each_file(log)) == 7
    for path in each_file(log):
        content = path.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(TamperedLog):
                log.check()
        path.write_bytes(content[:-1])
        with pytest.raises(TamperedLog):
            log.check()
        path.unlink()
        with pytest.raises(ForkedLog, match="is missing", check=coded("log.truncated_log")):
            log.check()
        path.write_bytes(content)
        assert log.check() == 600


@pytest.mark.threat("L1")
def test_the_changed_entry_is_named(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(300))
    path = log.folder / "tile/entries/001.p/44"
    path.write_bytes(path.read_bytes().replace(b"entry 270", b"entry 27x"))
    with pytest.raises(TamperedLog, match="entry 270 "):
        log.check()
    with pytest.raises(TamperedLog, match="entry 270 "):
        log.tree().entry(270, log.opened().root)
    with pytest.raises(TamperedLog, match="last entries"):
        log.append([b"more"])


@pytest.mark.threat("L1")
def test_entries_rewritten_together_with_all_their_hashes(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(300))
    other = new_log(tmp_path / "other", [*numbered(299), b"rewritten"])
    shutil.rmtree(log.folder / "tile")
    shutil.copytree(other.folder / "tile", log.folder / "tile")
    with pytest.raises(TamperedLog, match="changed together with their hashes"):
        log.check()
    with pytest.raises(TamperedLog):
        log.append([b"more"])
    with pytest.raises(TamperedLog):
        log.tree().inclusion_proof(3, log.opened().root)
    # With the other log's checkpoint it is refused for its key.
    shutil.copy(other.folder / "checkpoint", log.folder / "checkpoint")
    with pytest.raises(ForgedStatement, check=coded("log.forged_note")):
        log.opened()


@pytest.mark.threat("L1")
def test_a_log_that_was_put_back_is_not_continued_by_its_key(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(10))
    shutil.copytree(log.folder, tmp_path / "old")
    log.append(numbered(5, 10))
    shutil.rmtree(log.folder)
    shutil.copytree(tmp_path / "old", log.folder)
    assert log.check() == 10  # taken alone it is a valid log
    with pytest.raises(
        ForkedLog, match=r"ends at 10 entries.*has 15", check=coded("log.truncated_log")
    ):
        log.append([b"another eleventh"])


@pytest.mark.threat("L2")
def test_views_that_contradict_each_other(tmp_path: Path) -> None:
    entries = numbered(300)
    log = new_log(tmp_path, entries)
    stored, root = log.tree(), log.opened().root

    def seen(history: list[bytes]) -> None:
        note = parse_note(signed_note(log.signer, history))
        stored.check_contains(root, parse_checkpoint(note.text), "what was seen")

    for size in (0, 1, 255, 256, 257, 300):
        seen(entries[:size])
    with pytest.raises(ForkedLog, match="what was seen has 301", check=coded("log.truncated_log")):
        seen([*entries, b"more"])
    for history in ([b"other"], [*entries[:255], b"other"], [*entries[:-1], b"other"]):
        with pytest.raises(ForkedLog, match="what was seen"):
            seen(history)


def test_whose_log_it_is(tmp_path: Path) -> None:
    log = new_log(tmp_path, [b"one"])
    note = (log.folder / "checkpoint").read_bytes()
    stranger = Signer.generate(ORIGIN, SignatureKind.NOTE)
    elsewhere = Signer.generate("example.com/other", SignatureKind.NOTE)
    with pytest.raises(ForgedStatement, match="is of the log 'example", check=coded("log.wrong")):
        open_checkpoint(note, LogPolicy((Log(elsewhere.verifier),)))
    with pytest.raises(ForgedStatement, match="no key of the log", check=coded("log.forged_note")):
        open_checkpoint(note, LogPolicy((Log(stranger.verifier),)))
    with (
        pytest.raises(ForgedStatement, check=coded("log.forged_note")),
        LogWriter(log.folder, stranger),
    ):
        pass
    with pytest.raises(ForgedStatement, check=coded("log.wrong")), LogWriter(log.folder, elsewhere):
        pass


def test_a_log_that_was_made_meanwhile_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer.generate(ORIGIN, SignatureKind.NOTE)
    locked = files.locked

    @contextlib.contextmanager
    def locked_by_another_first(path: Path) -> Iterator[None]:
        monkeypatch.setattr(folder, "locked", locked)
        create_log(path, signer)
        with locked(path):
            yield

    monkeypatch.setattr(folder, "locked", locked_by_another_first)
    with pytest.raises(ConfigurationError, match="not empty"):
        create_log(tmp_path, signer)


@pytest.mark.threat("L22")
def test_folders_that_are_no_log(tmp_path: Path) -> None:
    signer = Signer.generate(ORIGIN, SignatureKind.NOTE)
    with pytest.raises(NotALog, match="no file checkpoint"), LogWriter(tmp_path, signer):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "something").touch()
    with pytest.raises(ConfigurationError, match="not empty"):
        create_log(tmp_path, signer)
    log = new_log(tmp_path / "logs", [b"one"])
    tile = log.folder / "tile/0/000.p/1"
    tile.unlink()
    os.mkfifo(tile)
    with pytest.raises(NotALog, match="not a regular file"):
        log.check()
    tile.unlink()
    tile.write_bytes(bytes(1 << 20))
    with pytest.raises(NotALog, match="larger than"):
        log.check()


def test_a_bundle_that_lies_about_its_lengths() -> None:
    for data in (b"\0", b"\0\5abc", b"\0\1a", b"\0\1a\0\1b\0\0"):
        with pytest.raises(TamperedLog):
            tree.decode_bundle(data, 2)
    assert tree.decode_bundle(b"\0\1a\0\0", 2) == [b"a", b""]


def test_proofs_of_a_tree_with_three_levels_of_tiles(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(66_000))
    signed, stored = log.opened(), log.tree()
    assert [level for level, _, _ in tree.right_edge(signed.size)] == [0, 1, 2]
    for index in (0, 65_535, 65_536, 65_999):
        proof = stored.inclusion_proof(index, signed.root)
        leaf = tree.leaf_hash(b"entry %d" % index)
        tree.check_inclusion(index, signed.size, leaf, proof, signed.root)
    log.append(numbered(1, 66_000))
    later = log.opened()
    for old in (1, 65_535, 65_536, 65_537, 66_000):
        log.tree().consistency_proof(old, later.root)
