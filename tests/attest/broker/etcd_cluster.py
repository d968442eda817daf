"""Members of etcd on this machine. A test can kill one of them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed (make system-deps)"
)


class Cluster:
    def __init__(self, directory: Path, members: int = 3, tls: Sequence[str] = ()) -> None:
        """`tls` are etcd's options for certificates. Clients then use https."""
        scheme = "https" if tls else "http"
        self._clients = [free_port() for _ in range(members)]
        peers = [free_port() for _ in range(members)]
        named = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(peers))
        environment = dict(os.environ)
        if platform.machine() != "x86_64":
            # Debian's etcd starts on other architectures only with this variable.
            environment["ETCD_UNSUPPORTED_ARCH"] = {"aarch64": "arm64"}.get(
                platform.machine(), platform.machine()
            )
        self._members = [
            subprocess.Popen(
                [
                    "etcd", "--name", f"m{n}", "--data-dir", str(directory / f"m{n}"),
                    "--listen-client-urls", f"{scheme}://127.0.0.1:{client}",
                    "--advertise-client-urls", f"{scheme}://127.0.0.1:{client}",
                    "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-cluster", named, "--initial-cluster-token", directory.name,
                    *tls,
                ],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for n, (client, peer) in enumerate(zip(self._clients, peers, strict=True))
        ]  # fmt: skip

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self._clients)

    def leader(self) -> int:
        """The number of the leader, once there is one."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for number, port in enumerate(self._clients):
                if self._members[number].poll() is not None:
                    continue
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v3/maintenance/status", b"{}"
                )
                try:
                    with urllib.request.urlopen(request, timeout=2) as answer:
                        status = json.load(answer)
                except OSError:
                    continue
                if status.get("leader") and status["leader"] == status["header"]["member_id"]:
                    return number
            time.sleep(0.1)
        raise AssertionError("etcd found no leader")

    def kill(self, number: int) -> None:
        self._members[number].kill()
        self._members[number].wait()

    def close(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()


@contextmanager
def cluster(directory: Path, members: int = 3) -> Iterator[Cluster]:
    started = Cluster(directory, members)
    try:
        started.leader()
        yield started
    finally:
        started.close()
