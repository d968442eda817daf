"""Data into a vault: each format, once, resumed, in parallel, and always with the same digest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sealring.errors import BadSource, ConfigurationError, Unsupported, WorkerFailed
from sealring.vault import Dataset, keys, trees
from sealring.vault.datasets import formats
from sealring.vault.datasets.building import ingest
from sealring.vault.datasets.formats import Limits
from sealring.vault.datasets.work import InProcesses, in_this_process
from sealring.vault.objects import VERSION_NAME, complete
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.storage import LocalPath
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.crashes import killed_at
from tests.vault.datasets.made import images, json_lines, sealed, tar, tokens


def reopened(vault: Vault, key: Path) -> Vault:
    """In a forked child, which has no keys of its parent's."""
    return Vault.open(vault.path, keys.key_file(key))


def content(vault: Vault, name: str = "data") -> list[Any]:
    dataset = Dataset(vault, name)
    return [dataset[number] for number in range(len(dataset))]


def test_json_lines(vault: Vault, tmp_path: Path) -> None:
    built = sealed(vault, json_lines(tmp_path / "source"))
    assert (built.samples, built.changed, built.made) == (100, True, built.shards)
    assert built.shards > 4  # lines belong to the shard in which they begin
    assert [sample["n"] for sample in content(vault)] == list(range(100))


@pytest.mark.parametrize("shard", [1, 2, 3, 17, 64, 10_000])
def test_every_line_is_in_one_shard_wherever_a_file_is_cut(
    vault: Vault, tmp_path: Path, shard: int
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n":0}\n\n{"n":1}\r\n  {"n":2}  \n{"n":3}')  # the last without its end
    sealed(vault, path, shard=shard)
    assert [sample["n"] for sample in content(vault)] == [0, 1, 2, 3]


def test_a_webdataset_tar(vault: Vault, tmp_path: Path) -> None:
    members = [("./a/1.jpg", b"one"), ("a/1.cls.txt", b"0"), ("a/2.jpg", b"two"), ("b", b"three")]
    sealed(vault, tar(tmp_path / "some.tar", members))
    assert content(vault) == [
        {"key": "a/1", "files": {"jpg": b"one", "cls.txt": b"0"}},
        {"key": "a/2", "files": {"jpg": b"two"}},
        {"key": "b", "files": {"": b"three"}},
    ]


def test_a_folder_of_images(vault: Vault, tmp_path: Path) -> None:
    source = images(tmp_path / "images")
    (source / ".hidden").write_text("left out")
    sealed(vault, source)
    found = content(vault)
    assert [(one["label"], one["target"]) for one in found] == [("cat", 0)] * 5 + [("dog", 1)] * 5
    assert found[6]["path"] == "dog/1.png"
    assert found[6]["image"] == b"dog 1" * 30


def test_token_files(vault: Vault, tmp_path: Path) -> None:
    source = tokens(tmp_path / "tokens")
    with pytest.raises(ConfigurationError, match="--dtype uint16 or uint32"):
        sealed(vault, source)
    sealed(vault, source, dtype="uint16")
    found = content(vault)
    assert np.concatenate([one["tokens"] for one in found]).tolist() == list(range(1000))
    np.save(tmp_path / "b.npy", np.arange(70_000, 70_100, dtype="<u4"))
    sealed(vault, tmp_path / "b.npy", "other")
    assert content(vault, "other")[0]["tokens"][0] == 70_000


def test_parquet_rows(vault: Vault, tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array(range(50), pa.int32()),
            "text": [None if row == 3 else f"row {row}" for row in range(50)],
            "tokens": pa.array([[row, row + 1] for row in range(50)], pa.list_(pa.uint16())),
            "score": [row / 2 for row in range(50)],
            "good": [row % 2 == 0 for row in range(50)],
            "raw": [bytes([row]) for row in range(50)],
            "more": [{"deep": [row]} for row in range(50)],
        }
    )
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows" / "a.parquet", row_group_size=10)
    built = sealed(vault, tmp_path / "rows")
    assert built.shards == 5
    found = content(vault)
    assert [one["n"] for one in found] == list(range(50))
    assert found[3]["text"] is None
    assert found[4]["text"] == "row 4"
    assert found[4]["tokens"].tolist() == [4, 5]
    assert found[4]["tokens"].dtype == np.uint16
    assert (found[5]["score"], found[5]["good"], found[5]["raw"]) == (2.5, False, b"\5")
    assert found[5]["more"] == {"deep": [5]}
    assert not sealed(vault, tmp_path / "rows").changed


def test_a_second_run_changes_nothing_by_content(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    first = sealed(vault, source)
    before = {path: path.stat().st_mtime_ns for path in vault.path.local.rglob("shard-*")}
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    shutil.copytree(source, tmp_path / "elsewhere")
    again = sealed(vault, tmp_path / "elsewhere")
    assert (again.changed, again.made, again.version) == (False, 0, first.version)
    assert {path: path.stat().st_mtime_ns for path in vault.path.local.rglob("shard-*")} == before


def test_a_change_makes_only_the_shards_that_depend_on_it(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    first = sealed(vault, source)
    with open(source / "1.jsonl", "a") as file:
        file.write('{"n": 100}\n')
    second = sealed(vault, source)
    assert (second.version, second.made, second.changed) == (2, 1, True)
    assert second.digest != first.digest
    assert [sample["n"] for sample in content(vault)] == list(range(101))
    assert [sample["n"] for sample in [Dataset(vault, "data", version=1)[99]]] == [99]


def test_the_digest_depends_on_the_content_alone(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    here = sealed(vault, source)
    keys.make_key_file(tmp_path / "other.key")
    other = Vault.create(tmp_path / "other", keys.key_file(tmp_path / "other.key"), "o", CHACHA)
    with InProcesses(2) as run:
        there = ingest(other, source, "another name", run, limits=Limits(500, 1 << 20))
    assert there.digest == here.digest
    assert other.find("another name").copy.place.suite == CHACHA
    trees.rotate(vault, lambda count: None)
    assert Dataset(vault, "data").digest == here.digest
    assert sealed(vault, source, "slower", suite=CHACHA).digest == here.digest
    (source / "0.jsonl").write_text((source / "0.jsonl").read_text().replace("row 7", "row 8"))
    assert sealed(vault, source).digest != here.digest


def test_another_suite_seals_anew(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    assert sealed(vault, source, suite=AES).version == 1
    built = sealed(vault, source, suite=CHACHA)
    assert (built.version, built.made, built.changed) == (2, 0, True)
    assert [sample["n"] for sample in content(vault)] == list(range(100))
    assert not sealed(vault, source).changed  # it keeps the suite that it has


@pytest.mark.threat("P18")
def test_killed_at_every_step_it_goes_on_and_ends_the_same(tmp_path: Path, key: Path) -> None:
    source = json_lines(tmp_path / "source", count=12, files=1)

    def ingest_all(vault: Vault) -> None:
        sealed(vault, source, shard=140)

    wanted = Vault.create(tmp_path / "wanted", keys.key_file(key), "owner")
    digest = sealed(wanted, source, shard=140).digest
    step, made = 0, []
    while True:
        path = tmp_path / f"vault-{step}"
        vault = Vault.create(path, keys.key_file(key), "owner")
        through = not killed_at(step, lambda: ingest_all(Vault.open(path, keys.key_file(key))))  # noqa: B023
        there = bool(list(path.glob("objects/*/*/*/manifest")))
        built = sealed(vault, source, shard=140)
        assert built.digest == digest
        assert built.changed is not there  # a version that is whole is not made again
        assert [sample["n"] for sample in content(vault)] == list(range(12))
        made.append(built.made)
        (folder,) = (path / "objects").iterdir()
        assert len(list(complete(LocalPath(folder).entries(VERSION_NAME)))) == 1
        left = {one.name for one in folder.glob("*/*/*")}
        assert {"manifest", "key.json"} <= left
        if not there:
            assert not any(name.startswith(".") or "receipt" in name for name in left)
        shutil.rmtree(path)
        if through:
            break
        step += 1
    assert step > 20
    # Shards that were whole were not made again.
    assert made[0] == max(made) > 2
    assert {1, 2} <= set(made)


def test_junk_in_what_a_killed_ingest_has_left(vault: Vault, key: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source", count=12, files=1)
    killed_at(30, lambda: sealed(reopened(vault, key), source, shard=140))
    (left,) = (vault.path / "objects").local.glob("*/*/*")
    assert not (left / "manifest").exists()
    for name in ("junk", "shard-00000003", "shard-00000000.receipt"):
        (left / name).unlink(missing_ok=True)
        (left / name / "below").mkdir(parents=True)
    (left / "link").symlink_to(tmp_path)
    sealed(vault, source, shard=140)
    assert vault.find("data").copy.folder.local == left
    assert [sample["n"] for sample in content(vault)] == list(range(12))
    assert not (left / "junk").exists()
    assert source.exists()


def test_a_worker_process_that_is_killed_is_named_and_the_rest_is_kept(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json_lines(tmp_path / "source")
    limits = Limits(500, 1 << 20)
    with InProcesses(2) as run:

        def killing(tasks: Any, progress: Any) -> Any:
            yield from run(tasks[:2], progress)
            for child in os.listdir(f"/proc/{os.getpid()}/task"):
                try:
                    children = Path(f"/proc/{os.getpid()}/task/{child}/children").read_text()
                except FileNotFoundError:  # the thread has ended
                    continue
                for pid in children.split():
                    if "datasets.work" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(int(pid), 9)
            yield from run(tasks[2:], progress)

        with pytest.raises(WorkerFailed, match="Run the same command again"):
            ingest(vault, source, "data", killing, limits=limits)
    with InProcesses(2) as again:
        built = ingest(vault, source, "data", again, limits=limits)
    assert built.changed
    assert 0 < built.made < built.shards
    assert [sample["n"] for sample in content(vault)] == list(range(100))


def test_what_a_kill_left_of_another_source_is_not_taken(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    source = json_lines(tmp_path / "source")
    assert killed_at(60, lambda: sealed(reopened(vault, key), source))
    assert list(vault.path.local.rglob("*.receipt"))
    other = json_lines(tmp_path / "other", count=40)
    built = sealed(vault, other)
    assert [sample["n"] for sample in content(vault)] == list(range(40))
    assert built.version == 1


@pytest.mark.threat("P17")
def test_a_source_that_changes_while_it_is_sealed(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json_lines(tmp_path / "source", files=1)
    real = formats.JsonLines.samples

    def changing(self: Any, order: Any, *others: Any) -> Any:
        for number, sample in enumerate(real(self, order, *others)):
            if number == 0:
                with open(order["path"], "r+b") as file:
                    file.seek(order["stop"] - 2)
                    file.write(b" ")
            yield sample

    monkeypatch.setattr(formats.JsonLines, "samples", changing)
    with pytest.raises(
        BadSource, match=r"0\.jsonl was changed", check=coded("vault.source_changed")
    ):
        sealed(vault, source, shard=100_000)
    assert not list(vault.path.local.rglob("manifest"))


def test_names_of_other_objects_are_refused(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    trees.seal_path(vault, source, "files", None, lambda count: None)
    with pytest.raises(ConfigurationError, match="'files' is a files in this vault"):
        sealed(vault, source, "files")
    with pytest.raises(Unsupported, match="not a dataset"):
        Dataset(vault, "files")
    sealed(vault, source)
    with pytest.raises(Unsupported, match="is a dataset, not files"):
        trees.content_of(vault.find("data"))


def test_nothing_of_the_data_is_on_the_disk(vault: Vault, key: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    assert killed_at(60, lambda: sealed(reopened(vault, key), source, "secret-name"))
    for _ in range(2):
        for path in vault.path.local.rglob("*"):
            if path.is_file():
                assert b"row " not in path.read_bytes(), path
                assert b"secret-name" not in path.read_bytes(), path
            assert "secret" not in path.name
        sealed(vault, source, "secret-name")


@pytest.mark.threat("P20")
def test_a_child_gets_the_keys_of_two_shards_at_most(vault: Vault, tmp_path: Path) -> None:
    seen: list[Any] = []

    def looking(tasks: Any, progress: Any) -> Any:
        seen.extend((json.dumps(one.order), [bytes(key) for key in one.keys]) for one in tasks)
        return in_this_process(tasks, progress)

    ingest(vault, json_lines(tmp_path / "source"), "data", looking)
    assert seen
    place = vault.find("data").copy.place
    secrets = [bytes(place.key), bytes(vault.ring.key), bytes(vault.ring.names)]
    for text, given in seen:
        assert len(given) <= 2
        for secret in secrets:
            assert secret not in given
            assert secret.hex() not in text
        assert not any(one.hex() in text for one in given)


def test_memory_does_not_grow_with_the_data(vault: Vault, tmp_path: Path) -> None:
    """One shard's worth is held: the peak of 40 shards is that of 4."""
    import tracemalloc

    peaks = []
    for count in (4, 40):
        path = tmp_path / f"{count}.bin"
        path.write_bytes(bytes(count << 18))
        tracemalloc.start()
        ingest(vault, path, f"{count}", in_this_process, dtype="uint16", limits=Limits(1 << 18))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
