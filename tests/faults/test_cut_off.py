"""A rank whose network is cut without a reset: nothing arrives and nothing is acknowledged.

this namespace                    another namespace
ranks 0 and 1, the store          rank 2
10.x.y.1  ------ veth pair ------ 10.x.y.2
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.expected import assert_names
from tests.workers import Workers

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Wire:
    namespace: str
    device: str
    near: str
    far: str

    def mend(self) -> None:
        _do("ip", "link", "set", self.device, "up")
        within = ["ip", "netns", "exec", self.namespace]
        subprocess.run([*within, "nft", "flush", "ruleset"], capture_output=True)

    def cut_link(self) -> None:
        _do("ip", "link", "set", self.device, "down")

    def drop_packets(self) -> None:
        """Drops packets in the far namespace, so that this machine's rules stay untouched."""
        for rule in (
            "add table inet cut",
            "add chain inet cut in { type filter hook input priority 0; policy drop; }",
            "add chain inet cut out { type filter hook output priority 0; policy drop; }",
        ):
            _do("ip", "netns", "exec", self.namespace, "nft", rule)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and iproute2")
    number = os.getpid() % 60000
    net = f"10.{200 + number // 256 % 50}.{number % 256}"
    wire = Wire(f"sealring-{number}", f"seal{number}", f"{net}.1", f"{net}.2")
    try:
        _do("ip", "netns", "add", wire.namespace)
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"this machine makes no network namespaces: {problem.stderr.decode().strip()}")
    try:
        within = ("ip", "-n", wire.namespace)
        _do("ip", "link", "add", wire.device, "type", "veth",
            "peer", "name", "far", "netns", wire.namespace)  # fmt: skip
        _do("ip", "address", "add", f"{wire.near}/24", "dev", wire.device)
        _do("ip", "link", "set", wire.device, "up")
        _do(*within, "address", "add", f"{wire.far}/24", "dev", "far")
        _do(*within, "link", "set", "far", "up")
        _do(*within, "link", "set", "lo", "up")
        yield wire
    finally:
        subprocess.run(["ip", "netns", "delete", wire.namespace], capture_output=True)
        subprocess.run(["ip", "link", "delete", wire.device], capture_output=True)


@pytest.fixture(scope="module")
def own_workers(wire: Wire) -> Iterator[Workers]:
    """Workers for this module only, because the last one never leaves its namespace."""
    started = Workers(3)
    yield started
    started.close()


def enter(namespace: str) -> None:
    """Moves this thread, and the threads that it starts later, into the namespace."""
    with open(f"/run/netns/{namespace}") as target:
        if ctypes.CDLL(None, use_errno=True).setns(target.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def wait_for(file: Path) -> None:
    """Waits for a file, which needs no network."""
    while not file.exists():
        time.sleep(0.01)


def cut_off(rank: int, world: int, wire: Wire, how: str, idle: bool, folder: Path) -> str:
    if rank == 2:
        enter(wire.namespace)
    dist.init_process_group("sealring", timeout=timedelta(seconds=60))
    dist.group.WORLD.set_timeout(timedelta(seconds=3))  # type: ignore[union-attr]
    dist.barrier()
    (folder / f"after-barrier-{rank}").touch()
    if rank == 0:
        wait_for(folder / "after-barrier-1")
        wait_for(folder / "after-barrier-2")
        # The others are inside the collective by then, and it cannot end without this rank.
        time.sleep(0 if idle else 0.5)
        getattr(wire, how)()
        (folder / "cut").touch()
    elif idle:
        wait_for(folder / "cut")
    dist.all_reduce(torch.ones(1 << 19))
    return "reduced"


@pytest.mark.parametrize("idle", [False, True], ids=["in-a-collective", "while-idle"])
@pytest.mark.parametrize("how", ["cut_link", "drop_packets"])
@pytest.mark.threat("F4")
def test_a_rank_that_is_cut_off_is_named_within_the_timeout(
    wire: Wire, own_workers: Workers, how: str, idle: bool, tmp_path: Path
) -> None:
    if how == "drop_packets" and shutil.which("nft") is None:
        pytest.skip("dropping packets needs nft")
    environment = {
        "MASTER_ADDR": wire.near,
        "SEALRING_TRANSPORT": "tcp",
    }
    addresses = {
        rank: {"SEALRING_ADDRESS": wire.far if rank == 2 else wire.near, **environment}
        for rank in range(3)
    }
    wire.mend()
    results = own_workers.run(
        cut_off, wire, how, idle, tmp_path, world=3, group=False, rank_env=addresses, errors=True
    )
    for rank in (0, 1):
        assert_names(results[rank], 2, 2, "all_reduce")
    # The rank that is cut off cannot know which side failed; it names a rank that it waits for.
    assert_names(results[2], results[2].peer, 2, "all_reduce")
    assert results[2].peer in (0, 1)
