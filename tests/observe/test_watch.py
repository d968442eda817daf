"""`sealring doctor --watch` shows every socket of a job as sealed, named or not sealed."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sealring import limits
from sealring.cli import app
from sealring.core.links import setting_up
from sealring.core.links.listener import listen
from sealring.errors import ConfigurationError
from sealring.observe.gather import own_sockets, socket_status
from sealring.observe.watch import End, Known, Process, WatchedProcess, family, verdict_of, watch
from tests.observe.scenes import group_made
from tests.workers import Workers


def with_a_plaintext_group(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(10))
    plaintext = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(10), group=plaintext)


def sealed_only(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(10))


def at(live: Path) -> dict[str, str]:
    return {"SEALRING_LIVE": str(live)}


def environment(live: Path) -> dict[str, str]:
    return {**at(live), "SEALRING_TRANSPORT": "tcp"}


def by_verdict(process: WatchedProcess, before: set[int]) -> dict[str, list[str]]:
    """Return the reasons by verdict, without sockets that earlier tests left open."""
    found: dict[str, list[str]] = {}
    for each in process.sockets:
        if each.inode in before:
            continue
        found.setdefault(each.verdict, []).append(each.why)
    return found


@pytest.mark.threat("G9")
def test_a_plaintext_group_beside_a_sealed_one_is_shown(workers: Workers, tmp_path: Path) -> None:
    live = tmp_path / "live"
    workers.run(with_a_plaintext_group, world=2, env=environment(live))
    for rank in range(2):
        pid = workers.processes[rank].pid
        done = CliRunner().invoke(app, ["doctor", "--watch", str(pid), "--json"], env=at(live))
        assert done.exit_code == 1, done.output
        document = json.loads(done.stdout)
        assert document["sealed"] is False
        (process,) = document["processes"]
        assert {each["backend"]: each["sealed"] for each in process["groups"]} == {
            "cpu:sealring": True, "cpu:gloo,cuda:gloo": False,
        }  # fmt: skip
        verdicts = [each["verdict"] for each in process["sockets"]]
        assert verdicts.count("sealed") == 2  # one for collectives, one for messages
        assert verdicts.count("store") >= 1
        assert "unknown" not in verdicts
        open_to_peers = [each for each in process["sockets"] if each["verdict"] == "not sealed"]
        assert {each["kind"] for each in open_to_peers} == {"tcp"}
        assert "established" in {each["state"] for each in open_to_peers}
        assert open_to_peers[0]["why"] == (
            "not a link of sealring's; the process has groups of cpu:gloo,cuda:gloo"
        )


def test_a_sealed_job_has_no_other_sockets(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    before = set(own_sockets(workers.processes[0].pid))
    workers.run(sealed_only, world=2, env=environment(live))
    # The tests' own process started the workers, and holds the store where they meet.
    found = {each.pid: each for each in watch(os.getpid(), at(live))}
    kernels = found[workers.processes[0].pid]
    assert (kernels.answers, kernels.listed_by) == (True, "kernel")
    assert by_verdict(kernels, before).keys() == {"sealed", "store", "set-up", "local"}
    assert sorted(by_verdict(kernels, before)["sealed"]) == ["link to rank 1 of group 0"] * 2
    # The kernel does not list them to another process of the same user, and the worker does.
    monkeypatch.setattr(Process, "sockets", lambda self: None)
    (own,) = watch(kernels.pid, at(live))
    assert own.listed_by == "worker"
    assert by_verdict(own, before) == by_verdict(kernels, before)
    done = CliRunner().invoke(app, ["doctor", "--watch", str(kernels.pid)], env=at(live))
    assert "group 0, 2 ranks, cpu:sealring: sealed" in done.stdout


def links_made_when_first_needed(rank: int, world: int, live: Path) -> list[list[str]]:
    """Return this process's sealed sockets before it needs links with all ranks, and after."""
    before = set(own_sockets(os.getpid()))

    def sealed() -> list[str]:
        for _ in range(100):
            (own,) = [each for each in watch(os.getpid(), at(live)) if each.pid == os.getpid()]
            found = by_verdict(own, before)
            if not {"not sealed", "unknown"} & found.keys():
                return sorted(found["sealed"])
            time.sleep(0.1)  # of two connections that cross, one is closed
        raise AssertionError(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOST_LINKED_AT_ONCE", 1)
        dist.init_process_group("sealring")
    at_first = sealed()
    dist.all_to_all_single(torch.empty(world), torch.ones(world))
    if rank in (1, 2):
        dist.send(torch.ones(1), 3 - rank) if rank == 1 else dist.recv(torch.ones(1), 3 - rank)
    later = sealed()
    dist.barrier()
    dist.destroy_process_group()
    return [at_first, later]


def test_links_that_are_made_later_are_shown_as_sealed(tmp_path: Path) -> None:
    live = tmp_path / "live"
    workers = Workers(4)  # new ones, without sockets that other tests opened
    try:
        found = workers.run(
            links_made_when_first_needed, live, world=4, group=False, env=environment(live)
        )
    finally:
        workers.close()
    to = [f"link to rank {rank} of group 0" for rank in range(4)]
    assert found[1] == [[to[0]], [to[0], to[2], to[2], to[3]]]
    assert found[3] == [[to[2]], [to[0], to[1], to[2]]]


@pytest.mark.threat("G9")
def test_of_a_process_that_gives_no_status_nothing_is_claimed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (process,) = [
            each
            for each in watch(os.getpid(), {"SEALRING_LIVE": str(tmp_path / "none")})
            if each.pid == os.getpid()
        ]
        (listening,) = [
            each for each in process.sockets if each.local == "{}:{}".format(*server.getsockname())
        ]
    assert (listening.verdict, listening.state) == ("unknown", "listening")
    assert (process.answers, process.groups) == (False, [])


def test_a_process_that_may_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "sockets", lambda self: None)
    done = CliRunner().invoke(
        app, ["doctor", "--watch", str(os.getpid())], env=at(tmp_path / "none")
    )
    assert done.exit_code == 1
    assert "its sockets are not known: run this as root" in done.stdout


def test_sockets_on_which_links_are_being_made_are_named() -> None:
    known = Known({}, set(), set())
    with listen("127.0.0.1") as listener:
        address = listener.getsockname()
        with setting_up.create(socket.AF_INET) as dialed:
            dialed.connect(address)
            known.setting_up.update(setting_up.inodes())
            status = socket_status(group_made())
            (process,) = [each for each in family(os.getpid()) if each.pid == os.getpid()]
            table = process.table()
            for sock, words in ((listener, "takes connections"), (dialed, "a connection")):
                inode = os.fstat(sock.fileno()).st_ino
                assert inode in status.setting_up
                assert verdict_of(table[inode], status, known) == (
                    "set-up", f"{words} for a link that is being made, under TLS",
                )  # fmt: skip
            descriptor = dialed.detach()  # as if the link were handed over
            inode = os.fstat(descriptor).st_ino
            assert inode not in setting_up.inodes()
            os.close(descriptor)
    assert setting_up.inodes() == []


def test_no_such_process() -> None:
    with pytest.raises(ConfigurationError, match="there is no process 4194305"):
        watch(4_194_305, {})


def test_a_child_is_found_below_its_parent() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    try:
        assert child in {each.pid for each in family(os.getpid())}
        assert [each.pid for each in family(child)] == [child]
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("family_of", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
)
def test_addresses_are_read_as_the_kernel_writes_them(family_of: Any, host: str) -> None:
    with socket.create_server((host, 0), family=family_of) as server:
        (process,) = [each for each in family(os.getpid()) if each.pid == os.getpid()]
        found = process.table()[os.fstat(server.fileno()).st_ino]
        assert found.local == End(host, server.getsockname()[1])
        assert (found.kind, found.state, found.remote) == ("tcp", "listening", None)


def test_a_mapped_address_is_shown_as_what_it_is() -> None:
    """An IPv4 connection to a socket for both kinds is shown as IPv4."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as accepted:
            (process,) = [each for each in family(os.getpid()) if each.pid == os.getpid()]
            found = process.table()[os.fstat(accepted.fileno()).st_ino]
    assert found.local == End("127.0.0.1", port)
