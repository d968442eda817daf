"""A core file, and a forked child's memory, searched for keys of the worker.

The worker runs as a user without rights and allows core files: this is what an operator gets who
switches them on to find a crash.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sealring.bench.workers import meeting_place
from tests.attacks import key_search
from tests.attacks.core_worker import CHILDS_MEMORY
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start


def why_no_core() -> str | None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or pattern.startswith("|"):
        return f"this machine's core files go elsewhere ({pattern})"
    limit = subprocess.run(["sh", "-c", "ulimit -Hc"], check=True, capture_output=True, text=True)
    return "core files are forbidden here" if limit.stdout.strip() == "0" else None


needs_core = pytest.mark.skipif(why_no_core() is not None, reason=str(why_no_core()))


def run(mode: str, folder: Path, transport: str) -> dict[str, bytes]:
    """Runs two ranks; returns rank 0's keys."""
    folder.chmod(0o777)
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        place = stack.enter_context(meeting_place())
        processes = []
        for rank in range(2):
            environment = {
                **os.environ,
                **place,
                "PYTHONPATH": str(CHECKOUT),
                "PYTHONDONTWRITEBYTECODE": "1",
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "SEALRING_SECRET": secret,
                "SEALRING_JOB": "core",
                "SEALRING_REKEY_BYTES": str(1 << 20),
                "SEALRING_TRANSPORT": transport,
                "OMP_NUM_THREADS": "1",
            }
            process: Any = start(
                [sys.executable, "-m", "tests.attacks.core_worker", mode],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        lines = [line.split() for line in processes[0].stdout.read().splitlines()]
        processes[0].wait()
    keys = {line[1]: key_search.unmasked(line[2]) for line in lines if line[0] == "key"}
    rekeys = [int(line[1]) for line in lines if line[0] == "rekeys"]
    assert rekeys, f"rank 0 did not come to the end: {lines}"
    assert 0 < rekeys[0] < key_search.RATCHETS, "keys were replaced, and all are searched for"
    assert len([name for name in keys if name.startswith("exporter")]) == 2
    assert len([name for name in keys if "EXPORTER_SECRET" in name]) == 2
    return keys


def files_of(folder: Path) -> Path:
    (dumped,) = folder.glob("core*")
    return dumped


@needs_unprivileged
@needs_core
@pytest.mark.parametrize("mode", ["living", "ended"])
def test_keys_in_a_core_file(tmp_path: Path, mode: str) -> None:
    keys = run(mode, tmp_path, "shm" if mode == "living" else "tcp")
    dumped = files_of(tmp_path)
    # What is in every such file shows that the search works on it.
    assert key_search.found_in(dumped, {"a name": b"SEALRING_REKEY_BYTES"}) == ["a name"]
    assert key_search.found_in(dumped, key_search.patterns(keys)) == []


@needs_unprivileged
def test_keys_in_a_forked_childs_memory(tmp_path: Path) -> None:
    keys = run("forked", tmp_path, "shm")
    memory = tmp_path / CHILDS_MEMORY
    assert key_search.found_in(memory, {"a name": b"SEALRING_REKEY_BYTES"}) == ["a name"]
    assert key_search.found_in(memory, key_search.patterns(keys)) == []


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
    across = bytes(key_search._PIECE - 7) + key + bytes(10)
    file.write_bytes(across)
    assert key_search.found_in(file, wanted) == ["the key, generation 0"]
