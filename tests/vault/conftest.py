from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sealring.vault import keys
from sealring.vault.vault import Vault
from tests.ports import free_port


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "vault.key"
    keys.make_key_file(path)
    return path


@pytest.fixture
def vault(tmp_path: Path, key: Path) -> Vault:
    return Vault.create(tmp_path / "vault", keys.key_file(key), "owner")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A server that speaks S3 over HTTP, in a process of its own."""
    pytest.importorskip("s3fs")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    chosen = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
              "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def clear_memory_store() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def copy_to_store(vault: Vault, url: str) -> None:
    """What any program that copies files does: the manifests last, then the header."""
    folder = Path(vault.path.local)
    files = [one for one in folder.rglob("*") if one.is_file() and one.parent != folder]
    for file in sorted(files, key=lambda one: one.name == "manifest"):
        with fsspec.open(f"{url}/{file.relative_to(folder)}", "wb") as target:
            target.write(file.read_bytes())
    with fsspec.open(f"{url}/vault.json", "wb") as target:
        target.write((folder / "vault.json").read_bytes())


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        clear_memory_store()
        return "memory://place"
    if request.param == "file":
        return f"file://{tmp_path / 'remote'}"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
