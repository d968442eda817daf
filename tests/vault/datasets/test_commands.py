"""`sealring vault ingest` and `build` as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sealring.errors import BadSource, ConfigurationError, VaultError
from sealring.vault import Dataset, key_file
from sealring.vault.keys import make_key_file
from sealring.vault.sealed import CHACHA
from sealring.vault.vault import Vault
from tests.vault.datasets.made import json_lines, tokens
from tests.vault.test_commands import Shell


@pytest.fixture
def sh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, key="k")
    shell("init", "v")
    json_lines(tmp_path / "corpus")
    return shell


def test_ingest_says_what_it_did_and_the_second_time_that_it_did_nothing(sh: Shell) -> None:
    said = sh("ingest", "v", "corpus", "--shard-size", "1KiB", "--processes", "2")
    assert "corpus is sealed as version 1: 100 samples in 4 shards" in said
    assert "nothing was changed" in sh("ingest", "v", "corpus", "--shard-size", "1KiB")
    found = json.loads(sh("ingest", "v", "corpus", "--shard-size", "1KiB", "--json"))
    assert (found["samples"], found["made"], found["changed"]) == (100, 0, False)
    assert found["digest"] in said
    (row,) = json.loads(sh("ls", "v", "--json"))["objects"]
    assert (row["kind"], row["parts"]) == ("dataset", 4)
    (row,) = json.loads(sh("verify", "v", "--json"))["objects"]
    assert row["error"] is None


def test_a_dataset_for_a_gpu(sh: Shell) -> None:
    tokens(sh.folder / "t")
    said = sh("ingest", "v", "t", "--dtype", "uint16", "--suite", "chacha20-poly1305")
    assert "1 sample in 1 shard" in said
    vault = Vault.open(sh.folder / "v", key_file(sh.folder / "k"))
    assert vault.find("t").copy.place.suite == CHACHA
    dataset = Dataset(vault, "t", length=10)
    assert len(dataset) == 100
    dataset.close()


@pytest.mark.parametrize(
    ("arguments", "error", "about"),
    [
        (["--format", "csv"], ConfigurationError, "it is one of parquet, jsonl"),
        (["--format", "parquet"], BadSource, "is jsonl and not parquet"),
        (["--suite", "rot13"], ConfigurationError, "aes-256-gcm or chacha20-poly1305"),
        (["--shard-size", "many"], ConfigurationError, "many"),
        (["--largest-sample", "12"], BadSource, "longer than 12 bytes"),
        (["--key", "other"], VaultError, "not open to this key file"),
        (["--name", "\n"], ConfigurationError, "printable"),
    ],
)
def test_bad_input_to_ingest(
    sh: Shell, arguments: list[str], error: type[Exception], about: str
) -> None:
    make_key_file(sh.folder / "other")
    with pytest.raises(error, match=about) as found:
        sh("ingest", "v", "corpus", *arguments)
    assert type(found.value) is error


def test_ingest_that_is_killed_leaves_no_process_and_goes_on(sh: Shell) -> None:
    json_lines(sh.folder / "large", count=4000)
    command = [sys.executable, "-m", "sealring.cli", "vault", "ingest", "v", "large"]
    options = ["--key", "k", "--shard-size", "1KiB", "--processes", "2", "--json"]
    running = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, cwd=sh.folder)
    deadline = time.monotonic() + 60
    while len(list((sh.folder / "v").rglob("*.receipt"))) < 4:
        assert running.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    task = Path(f"/proc/{running.pid}/task")
    children = [
        int(pid) for one in task.iterdir() for pid in (one / "children").read_text().split()
    ]
    assert len(children) == 2
    running.kill()
    running.communicate()
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in children):
        assert time.monotonic() < deadline, "a worker process outlived its parent"
        time.sleep(0.05)
    found = json.loads(sh("ingest", "v", "large", *options))
    assert found["samples"] == 4000
    assert 0 < found["made"] <= found["shards"] - 4
