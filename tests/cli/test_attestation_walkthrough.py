"""The commands of docs/attestation.md, taken from it and run as they stand, on three machines.

Each machine has namespaces of its own for network, mounts and host name:

    broker 10.77.0.1 (a bridge) ---- host0 10.77.0.10, with a TPM in software
                                ---- host1 10.77.0.11, with another

The vendors' servers are played on the broker's loopback: AMD's serves the list of the TPMs' maker.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sealring.bench.minting import certificates
from sealring.bench.minting.certificates import Holder, issue, pem
from sealring.bench.minting.nvidia import Nvidia
from sealring.bench.minting.tpm import Maker
from sealring.identity.attestation.tpm import machine as machine_module
from sealring.identity.attestation.tpm.commands import Tpm
from tests.identity.attestation import swtpm

DOCUMENT = Path(__file__).parents[2] / "docs" / "attestation.md"
FENCE = re.compile(r"^( *)```(sh|toml)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
ADDRESSES = {"broker": "10.77.0.1", "host0": "10.77.0.10", "host1": "10.77.0.11"}
VENDORS = ("kdsintf.amd.com", "ocsp.ndis.nvidia.com")
PATIENCE = 120.0
TRAIN = """
import json, pathlib, time, torch, torch.distributed as dist
from sealring.broker import data_key
dist.init_process_group("sealring")
value = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(value)
told = {"sum": value.tolist(), "key": data_key("gpt/key/dataset").hex()}
pathlib.Path("result.new").write_text(json.dumps(told))
pathlib.Path("result.new").rename("result")
while not pathlib.Path("go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Block:
    machines: tuple[str, ...]
    text: str


def blocks(language: str) -> list[str]:
    found = FENCE.findall(DOCUMENT.read_text())
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def commands() -> list[Block]:
    """Each block of commands says in its first line where it is run."""
    found = []
    for text in blocks("sh"):
        match = re.match(r"# on (\w+)(?: and (\w+))?\n", text)
        assert match, f"where is this run? {text}"
        found.append(Block(tuple(name for name in match.groups() if name), text))
    return found


def test_every_command_of_the_document_is_in_a_block_that_is_run() -> None:
    """Each block belongs to one step of the test below: a new one must be given its place."""
    told = [(block.machines, block.text.splitlines()[1].split(" ")[:3]) for block in commands()]
    hosts, broker = ("host0", "host1"), ("broker",)
    assert told == [
        (hosts, ["sealring", "attest"]),
        (broker, ["sealring", "policy", "new"]),
        (broker, ["sealring", "policy", "check"]),
        (broker, ["sealring", "ca", "init"]),
        (hosts, ["sealring", "run", "-n"]),
        (broker, ["curl", "-sf", "http://127.0.0.1:8444/"]),
        (broker, ["sealring", "broker", "simulator"]),
        (broker, ["openssl", "ocsp", "-issuer"]),
    ]


@dataclass
class Machine:
    name: str
    folder: Path
    holder: subprocess.Popen[bytes]
    environ: dict[str, str] = field(default_factory=dict)

    def inside(self, text: str) -> list[str]:
        pid = str(self.holder.pid)
        script = f"cd {self.folder}\n{text}"
        return [
            "nsenter", "--target", pid, "--net", "--mount", "--uts", "--",
            "bash", "-euo", "pipefail", "-c", script,
        ]  # fmt: skip

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.inside(text), env=self.environ, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, text: str) -> str:
        process = self.start(text)
        try:
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            end(process)
        assert process.returncode == 0, f"on {self.name}:\n{text}\n{out}"
        return out


def end(process: subprocess.Popen[str]) -> None:
    """The process and those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def machines(folder: Path) -> Iterator[dict[str, Machine]]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "curl"))):
        pytest.skip("making network namespaces needs root, iproute2, util-linux and curl")
    made: dict[str, Machine] = {}
    with ExitStack() as stack:
        for name in ADDRESSES:
            own = folder / name
            own.mkdir()
            hosts = own / ".hosts"
            local = " ".join(("localhost", *(VENDORS if name == "broker" else ())))
            known = "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())
            hosts.write_text(f"127.0.0.1 {local}\n{known}")
            script = (
                f"mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up"
                " && echo ready && exec sleep 1000"
            )
            holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "sh", "-c", script],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(stop, holder)
            assert holder.stdout is not None
            said = holder.stdout.readline()
            if said != b"ready\n":
                pytest.skip(f"this machine makes no namespaces: {said.decode().strip()}")
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environ = {"PATH": path, "HOME": str(own), "OMP_NUM_THREADS": "1"}
            made[name] = Machine(name, own, holder, environ)
        connect(made)
        yield made


def stop(holder: subprocess.Popen[bytes]) -> None:
    """The namespaces end with the process that holds them."""
    holder.kill()
    holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()


def connect(made: dict[str, Machine]) -> None:
    broker = made["broker"]
    broker.run("ip link add bridge type bridge && ip link set bridge up")
    broker.run(f"ip address add {ADDRESSES['broker']}/24 dev bridge")
    for name in ("host0", "host1"):
        pid = made[name].holder.pid
        broker.run(
            f"ip link add {name} type veth peer name eth0 netns {pid}\n"
            f"ip link set {name} master bridge up"
        )
        made[name].run(f"ip address add {ADDRESSES[name]}/24 dev eth0 && ip link set eth0 up")


@contextmanager
def tpm_of(maker: Maker, folder: Path) -> Iterator[str]:
    """The address of a TPM whose endorsement key this maker has certified, and that has booted."""
    state = folder / ".tpm"
    state.mkdir()
    with swtpm.running(state) as address:
        with Tpm.open(address) as tpm:
            with tpm.primary(machine_module._EK_P256) as (_, public):
                x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
            key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
            own = issue(
                "endorsement key", maker.signer, ca=False, curve=ec.SECP256R1(), public_key=key,
                days=100, usage=["key_encipherment"],
                extensions=[x509.ExtendedKeyUsage([x509.ObjectIdentifier("2.23.133.8.1")])],
            )  # fmt: skip
            swtpm.store(tpm, 0x01C0000A, own.der)
            for pcr in (0, 4, 7):
                swtpm.extend(tpm, pcr, bytes([pcr + 1]) * 32)
        yield address


@contextmanager
def vendors(broker: Machine, maker: Maker, gpu: Nvidia) -> Iterator[None]:
    """AMD's server gives the list of the TPMs' maker; NVIDIA's answers OCSP, by openssl."""
    own, folder = issue("vendor", None, ca=True), broker.folder
    site = folder / ".site" / "vcek" / "v1" / "Milan"
    site.mkdir(parents=True)
    (site / "crl").write_bytes(maker.root.revocation_list().public_bytes(Encoding.DER))
    names = x509.SubjectAlternativeName([x509.DNSName(VENDORS[0])])
    shown = issue(VENDORS[0], own, ca=False, usage=["digital_signature"], extensions=[names])
    (folder / ".vendor.pem").write_text(pem(shown) + key_pem(shown))
    (folder / ".vendors.pem").write_text(pem(own))
    broker.environ["CURL_CA_BUNDLE"] = str(folder / ".vendors.pem")
    (folder / "device.pem").write_text(pem(gpu.boot))
    (folder / "provisioner.pem").write_text(pem(gpu.provisioner))
    (folder / ".provisioner.key").write_text(key_pem(gpu.provisioner))
    serial = f"{gpu.boot.certificate.serial_number:X}"
    serial = serial.rjust(len(serial) + len(serial) % 2, "0")
    (folder / ".index").write_text(f"V\t400101000000Z\t\t{serial}\tunknown\t/CN=device\n")
    web = (
        "import http.server, ssl\n"
        "context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n"
        "context.load_cert_chain('.vendor.pem')\n"
        "handler = lambda *a: http.server.SimpleHTTPRequestHandler(*a, directory='.site')\n"
        "server = http.server.HTTPServer(('127.0.0.1', 443), handler)\n"
        "server.socket = context.wrap_socket(server.socket, server_side=True)\n"
        "server.serve_forever()\n"
    )
    (folder / ".web.py").write_text(web)
    serving = [
        broker.start("exec python .web.py"),
        broker.start(
            "exec openssl ocsp -port 80 -index .index -CA provisioner.pem -rsigner provisioner.pem "
            "-rkey .provisioner.key -ndays 5"
        ),
    ]
    try:
        answers(broker, 443)
        # openssl's answers one connection after the other, and waits for what a probe does not say.
        assert any("waiting" in line for line in serving[1].stdout or ())
        yield
    finally:
        for process in serving:
            end(process)


def key_pem(holder: Holder) -> str:
    encoded = holder.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return encoded.decode()


def answers(machine: Machine, port: int) -> None:
    machine.run(
        f"for i in $(seq 900); do (: < /dev/tcp/127.0.0.1/{port}) 2>&- && exit; sleep 0.1; done\n"
        "false"
    )


def wait_for(path: Path, *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        for process in processes:
            if process.poll() is not None and process.stdout is not None:
                pytest.fail(f"it ended before {path.name} was there:\n{process.stdout.read()}")
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.05)


@swtpm.needs_swtpm
@pytest.mark.timeout(400)
def test_the_commands_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "NOW", datetime.now(UTC))
    maker, gpu = Maker(), Nvidia()
    attest, new, check, begin, run, watch, simulator, ocsp = (one.text for one in commands())
    more = blocks("toml")[0]
    with ExitStack() as stack:
        made = stack.enter_context(machines(tmp_path))
        broker, hosts = made["broker"], (made["host0"], made["host1"])
        stack.enter_context(vendors(broker, maker, gpu))
        for host in hosts:
            (host.folder / "chain.pem").write_text(pem(maker.signer, maker.root))
            host.environ |= {
                "SEALRING_ATTESTER": "tpm",
                "SEALRING_ATTESTER_CHAIN": "chain.pem",
                "SEALRING_TPM": stack.enter_context(tpm_of(maker, host.folder)),
            }
        # 1: what the hosts show becomes the policy.
        with ThreadPoolExecutor(2) as both:
            list(both.map(lambda host: host.run(attest), hosts))
        for host in hosts:
            shutil.copy(host.folder / f"{host.name}.json", broker.folder)
        assert "LEFT OPEN tpm: ima is not checked" in broker.run(new)
        # 2
        policy = broker.folder / "policy.toml"
        policy.write_text(policy.read_text() + "\n" + more)
        told = broker.run(check)
        assert "gpt/key/dataset goes to all ranks of tpm." in told
        # 3: the last command of the block goes on until the end.
        serving = broker.start(begin)
        stack.callback(end, serving)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(serving.stdout or ()), daemon=True)
        reader.start()
        answers(broker, 8443)
        # 4
        training = []
        for host in hosts:
            shutil.copy(broker.folder / "ca" / "authority.pem", host.folder)
            shutil.copy(policy, host.folder)
            (host.folder / "train.py").write_text(TRAIN)
            training.append(host.start(run))
            stack.callback(end, training[-1])
        for host in hosts:
            wait_for(host.folder / "result", *training)
            result = json.loads((host.folder / "result").read_text())
            key = (broker.folder / "dataset.key").read_bytes()
            assert result == {"sum": [3.0] * 3, "key": key.hex()}
        # 5: while they train.
        told = broker.run(watch)
        page = (broker.folder / "page.html").read_text()
        assert page.count("tpm 2.0") >= 2
        assert told.count("joined") == 2
        assert "Peers learn of it at their next renewal" in told
        for host in hosts:
            (host.folder / "go").touch()
        for process in training:
            out, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, out
        assert any("judged (--without-binding)" in line for line in said)
        # And the rest of the document.
        assert "[simulated]" in broker.run(simulator)
        broker.run(ocsp)
        assert (broker.folder / "cache" / "gpu0.ocsp").stat().st_size
