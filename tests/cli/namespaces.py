"""Machines of one network, each with its own namespaces, and the vendors' servers.

broker 10.77.0.1 (a bridge) ---- host0 10.77.0.10
                            ---- host1 10.77.0.11

`machines` accepts other names and addresses; the first machine has the bridge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import Tpm
from tests.attest.evidence import swtpm
from tests.attest.minting import Holder, issue, pem
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import Maker

ADDRESSES = {"broker": "10.77.0.1", "host0": "10.77.0.10", "host1": "10.77.0.11"}
VENDORS = ("kdsintf.amd.com", "ocsp.ndis.nvidia.com")
PATIENCE = 120.0


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
    """Ends the process and those that it started."""
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
def machines(
    folder: Path, addresses: Mapping[str, str] = ADDRESSES, *, prepare: str = "true"
) -> Iterator[dict[str, Machine]]:
    """Makes the machines; first the shell command `prepare` runs in each one's folder."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "curl"))):
        pytest.skip("making network namespaces needs root, iproute2, util-linux and curl")
    made: dict[str, Machine] = {}
    with ExitStack() as stack:
        for name in addresses:
            own = folder / name
            own.mkdir()
            hosts = own / ".hosts"
            local = " ".join(("localhost", *(VENDORS if name == "broker" else ())))
            known = "".join(f"{address} {host}\n" for host, address in addresses.items())
            hosts.write_text(f"127.0.0.1 {local}\n{known}")
            script = (
                f"mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up"
                f" && cd {own} && {prepare} && echo ready && exec sleep 1000"
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
        connect(made, addresses)
        yield made


def stop(holder: subprocess.Popen[bytes]) -> None:
    """Ends a machine's namespaces by ending the process that holds them."""
    holder.kill()
    holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()


def connect(made: dict[str, Machine], addresses: Mapping[str, str]) -> None:
    first, *others = made
    made[first].run("ip link add bridge type bridge && ip link set bridge up")
    made[first].run(f"ip address add {addresses[first]}/24 dev bridge")
    for name in others:
        pid = made[name].holder.pid
        made[first].run(
            f"ip link add {name} type veth peer name eth0 netns {pid}\n"
            f"ip link set {name} master bridge up"
        )
        made[name].run(f"ip address add {addresses[name]}/24 dev eth0 && ip link set eth0 up")


@contextmanager
def tpm_of(maker: Maker, folder: Path) -> Iterator[str]:
    """Yields the address of a booted TPM whose endorsement key this maker has certified."""
    state = folder / ".tpm"
    state.mkdir()
    with swtpm.running(state) as address:
        with Tpm.open(address) as tpm:
            with tpm.primary(machine_module.EK_P256) as (_, public):
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
    """Runs AMD's server with the TPM maker's list, and NVIDIA's OCSP server, by openssl."""
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
        # openssl serves connections one by one, and a probe without a request would block it.
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
