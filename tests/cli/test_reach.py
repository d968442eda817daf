"""Two machines with a firewall or an address translation between them (docs/reach.md).

internet 10.77.0.1 (a bridge) ---- host0 10.77.0.10, from outside 203.0.113.10
                              ---- host1 10.77.0.11, from outside 203.0.113.11
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.namespaces import Machine, end, machines

ADDRESSES = {"internet": "10.77.0.1", "host0": "10.77.0.10", "host1": "10.77.0.11"}
PATIENCE = 100.0
MEETING = 29400
SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("sealring", timeout=timedelta(seconds=float(sys.argv[1])))
mine = torch.full((4,), dist.get_rank() + 1)
dist.all_reduce(mine)
sys.stdout.write(f"sum {int(mine[0])}\\n")  # in one piece: workers share the output
dist.destroy_process_group()
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if shutil.which("nft") is None:
        pytest.skip("a firewall needs nftables")
    shared = secrets.token_hex(32)
    with machines(tmp_path, ADDRESSES) as made:
        for each in made.values():
            (each.folder / "train.py").write_text(SCRIPT)
            secret = each.folder / "job.secret"
            secret.write_text(shared)
            secret.chmod(0o600)
        yield made


def let_in(machine: Machine, *ports: int | str) -> None:
    """Makes the machine drop all other connections, without an answer."""
    listed = ", ".join(map(str, ports))
    machine.run(
        "nft -f - <<'END'\n"
        "table inet guard { chain in { type filter hook input priority 0; policy drop;\n"
        "iif lo accept; ct state established,related accept; meta l4proto icmp accept;\n"
        + (f"tcp dport {{ {listed} }} accept;\n" if listed else "")
        + "}\n}\nEND"
    )


def translate(made: dict[str, Machine], rules: str) -> None:
    """Lets the machines reach each other only through the internet, which translates by `rules`."""
    internet, gateway = made["internet"], ADDRESSES["internet"]
    internet.run("echo 1 > /proc/sys/net/ipv4/ip_forward && ip address flush dev bridge")
    for name in ("host0", "host1"):
        internet.run(
            f"ip link set dev {name} nomaster\n"
            f"ip address add {gateway} peer {ADDRESSES[name]} dev {name}"
        )
        made[name].run(
            f"ip address flush dev eth0\n"
            f"ip address add {ADDRESSES[name]} peer {gateway} dev eth0\n"
            f"ip route add 203.0.113.0/24 via {gateway}"
        )
    internet.run(
        "nft -f - <<'END'\n"
        "table ip provider {\n"
        "chain in { type nat hook prerouting priority dstnat;\n" + rules + "}\n"
        "chain out { type nat hook postrouting priority srcnat;\n"
        "ip saddr 10.77.0.10 snat to 203.0.113.10; ip saddr 10.77.0.11 snat to 203.0.113.11; }\n"
        "}\nEND"
    )


def trained(
    made: dict[str, Machine],
    options: tuple[str, str],
    *,
    workers: int = 2,
    endpoint: str = ADDRESSES["host0"],
    timeout: float = 90.0,
) -> list[tuple[int, str]]:
    """Returns each machine's exit status and what it printed."""
    running = []
    try:
        for number, (own, meeting) in enumerate(
            zip(options, (ADDRESSES["host0"], endpoint), strict=True)
        ):
            command = (
                f"exec sealring run -n {workers} --nnodes 2 --node-rank {number} {own} "
                f"--rdzv-endpoint {meeting}:{MEETING} --secret-file job.secret train.py {timeout}"
            )
            running.append(made[f"host{number}"].start(command))
        said = [process.communicate(timeout=PATIENCE)[0] for process in running]
        return [(process.returncode, out) for process, out in zip(running, said, strict=True)]
    finally:
        for process in running:
            end(process)


def assert_trained(outcomes: list[tuple[int, str]], workers: int) -> None:
    total = sum(range(1, 2 * workers + 1))
    for status, out in outcomes:
        assert status == 0, out
        assert out.count(f"sum {total}\n") == workers, out


def assert_named(outcomes: list[tuple[int, str]], where: str) -> None:
    for status, out in outcomes:
        assert status == 1, out
        assert "handshake.peer_unreachable" in out
        assert "docs/reach.md" in out
    assert f"rank 0 cannot be connected to at {where}" in outcomes[1][1]


def test_workers_listen_on_the_open_ports_alone(made: dict[str, Machine]) -> None:
    let_in(made["host0"], MEETING, "29600-29603")
    let_in(made["host1"], "29610-29611")
    outcomes = trained(made, ("--ports 29600-29603", "--ports 29610,29611"))
    assert_trained(outcomes, workers=2)


def test_ports_that_are_not_told_are_named(made: dict[str, Machine]) -> None:
    let_in(made["host0"], MEETING, "29600-29603")
    let_in(made["host1"], "29600-29603")
    outcomes = trained(made, ("", ""), workers=1, timeout=9.0)
    assert_named(outcomes, f"{ADDRESSES['host0']} port ")
    assert "Connection timed out" in outcomes[1][1]


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_machine_that_only_dials(made: dict[str, Machine], deaf: int) -> None:
    """A machine that only dials may have any ranks, but the meeting's port must be open."""
    let_in(made["host0"], MEETING, *([] if deaf == 0 else ["29600-29603"]))
    let_in(made["host1"], *([] if deaf == 1 else ["29600-29603"]))
    outcomes = trained(made, ("--ports 29600-29603", "--ports 29600-29603"))
    assert_trained(outcomes, workers=2)


TO_HOST0 = "ip daddr 203.0.113.10 dnat to 10.77.0.10;\n"
TO_THE_MEETING = f"ip daddr 203.0.113.10 tcp dport {MEETING} dnat to 10.77.0.10;\n"
TO_HOST1 = (
    "ip daddr 203.0.113.11 tcp dport 41000 dnat to 10.77.0.11:29600;\n"
    "ip daddr 203.0.113.11 tcp dport 41001 dnat to 10.77.0.11:29601;\n"
)


def test_through_an_address_translation(made: dict[str, Machine]) -> None:
    translate(made, TO_HOST0)
    own = "--ports 29600-29603 --advertise 203.0.113."
    outcomes = trained(made, (f"{own}10", f"{own}11"), endpoint="203.0.113.10")
    assert_trained(outcomes, workers=2)


def test_through_a_translation_of_ports(made: dict[str, Machine]) -> None:
    """Only the meeting reaches the first machine, so that machine dials the second one."""
    translate(made, TO_THE_MEETING + TO_HOST1)
    own = "--ports 29600-29601 --advertise 203.0.113.11:41000-41001"
    outcomes = trained(made, ("", own), endpoint="203.0.113.10")
    assert_trained(outcomes, workers=2)


def test_an_address_that_is_not_told_is_named(made: dict[str, Machine]) -> None:
    translate(made, TO_HOST0)
    own = "--ports 29600-29603"
    outcomes = trained(made, (own, own), workers=1, endpoint="203.0.113.10", timeout=9.0)
    assert_named(outcomes, f"{ADDRESSES['host0']} port 29600")


def test_an_address_that_is_false_is_named(made: dict[str, Machine]) -> None:
    translate(made, TO_HOST0)
    own = "--ports 29600-29603 --advertise"
    told = (f"{own} 203.0.113.99", f"{own} 203.0.113.11")
    outcomes = trained(made, told, workers=1, endpoint="203.0.113.10", timeout=9.0)
    assert_named(outcomes, "203.0.113.99 port 29600")
    assert f"{ADDRESSES['host0']} port 29600" in outcomes[1][1]


@pytest.mark.parametrize(
    ("peer", "verdict"),
    [
        ("host0:29600", "answers"),
        ("host0:29601", "refuses"),
        ("host0:29602", "is silent"),
        ("10.99.0.1:29600", "no route"),
        ("[2001:db8::1]:29600", "no route"),
        ("unknown.invalid:29600", "unknown name"),
    ],
)
def test_whether_a_machine_can_be_reached(
    made: dict[str, Machine], peer: str, verdict: str
) -> None:
    let_in(made["host0"], 29600, 29601)
    listening = made["host0"].start(
        'exec python -c \'import socket, time; s = socket.create_server(("10.77.0.10", 29600)); '
        'print("listening", flush=True); time.sleep(100)\''
    )
    try:
        assert listening.stdout is not None
        assert listening.stdout.readline() == "listening\n"
        asked = made["host1"].start(f"sealring doctor --peer '{peer}' --json")
        out, _ = asked.communicate(timeout=PATIENCE)
    finally:
        end(listening)
    told = json.loads(out)
    assert [each["verdict"] for each in told["tried"]] == [verdict]
    assert told["reached"] == (asked.returncode == 0) == (verdict == "answers")
