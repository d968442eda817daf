"""Searches a core file and a forked child's memory for keys of the worker.

The worker runs as a user without privileges and allows core files. An operator who enables core
files to find a crash gets such a file.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sealring.core.settings import with_settings
from sealring.lab.bench.workers import meeting_place
from tests.attacks import key_search
from tests.attacks.core_worker import CHILDS_MEMORY, OWN_MEMORY
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start


def why_no_core() -> str | None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or pattern.startswith("|"):
        return f"this machine's core files go elsewhere ({pattern})"
    limit = subprocess.run(["sh", "-c", "ulimit -Hc"], check=True, capture_output=True, text=True)
    return "core files are forbidden here" if limit.stdout.strip() == "0" else None


needs_core = pytest.mark.skipif(why_no_core() is not None, reason=str(why_no_core()))


@dataclass(frozen=True)
class Written:
    folder: Path
    patterns: dict[str, bytes]
    """Byte patterns that must not be found, by name."""

    def found(self, name: str) -> list[str]:
        (file,) = self.folder.glob(name)
        # Every such file holds this name; finding it shows that the search works on the file.
        known = {"a variable's name": b"SEALRING_SETTINGS"}
        assert key_search.found_in(file, known) == ["a variable's name"]
        return key_search.found_in(file, self.patterns)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    folder = tmp_path_factory.mktemp("memory")
    folder.chmod(0o777)
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o111)
    lines = [line.split() for line in run(folder).splitlines()]
    keys = {line[1]: key_search.unmasked(line[2]) for line in lines if line[0] == "key"}
    rekeys = [int(line[1]) for line in lines if line[0] == "rekeys"]
    assert rekeys, f"rank 0 did not come to the end: {lines}"
    assert 0 < rekeys[0] < key_search.RATCHETS, "keys were replaced, and all are searched for"
    # One TLS handshake gives the first link's keys and a session; the session gives the second's.
    assert len([name for name in keys if name.startswith("exporter")]) == 2
    assert len([name for name in keys if "EXPORTER_SECRET" in name]) == 1
    assert len([name for name in keys if name.startswith("session")]) == 4
    assert len([name for name in keys if name.startswith("set-up")]) == 2
    assert len([name for name in keys if name.startswith("contribution")]) == 2
    assert len([name for name in keys if name.startswith("group-secret")]) == 1
    yield Written(folder, key_search.patterns(keys))
    shutil.rmtree(folder)


def run(folder: Path) -> str:
    """Runs two ranks; returns what rank 0 printed."""
    shared = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WORLD_SIZE": "2",
        "SEALRING_SECRET": secrets.token_hex(32),
        "SEALRING_JOB": "core",
        **with_settings({}, rekey_bytes=1 << 20),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        shared |= stack.enter_context(meeting_place())
        processes: list[Any] = []
        for rank in range(2):
            process = start(
                [sys.executable, "-m", "tests.attacks.core_worker"],
                env={**shared, "RANK": str(rank)},
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        printed: str = processes[0].stdout.read()
        processes[0].wait()
        return printed


@needs_unprivileged
@pytest.mark.threat("K21")
def test_keys_in_a_core_file_while_the_group_lives(written: Written) -> None:
    assert written.found(OWN_MEMORY) == []


@needs_unprivileged
@needs_core
@pytest.mark.threat("K21")
def test_keys_in_a_core_file_after_the_groups_end(written: Written) -> None:
    assert written.found("core*") == []


@needs_unprivileged
@pytest.mark.threat("K21")
def test_keys_in_a_forked_childs_memory(written: Written) -> None:
    assert written.found(CHILDS_MEMORY) == []


def test_the_search_finds_what_there_is(tmp_path: Path) -> None:
    key = secrets.token_bytes(32)
    wanted = key_search.patterns({"the key": key})
    # FIPS 197, appendix A.3.
    example = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    assert key_search.round_keys(example)[-16:].hex() == "fe4890d1e6188d0b046df344706c631e"
    for number, (name, pattern) in enumerate(wanted.items()):
        if number % 50:
            continue
        memory = bytes(8191 + number) + pattern + bytes(100)
        assert key_search.found_among([memory], wanted) == [name]
    file = tmp_path / "memory"
    across = bytes(key_search.PIECE - 7) + key + bytes(10)
    file.write_bytes(across)
    assert key_search.found_in(file, wanted) == ["the key, generation 0"]
