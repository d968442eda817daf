"""`sealring attest`: what this machine could prove about itself, by the devices it has."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from rich.table import Table

from sealring.attest.evidence import Policy
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.evidence import NONCE_BYTES
from sealring.attest.evidence.intel_collateral import TDX
from sealring.attest.evidence.kinds import DEVICE_KINDS, KINDS, find_attester
from sealring.attest.evidence.policy_devices import DeviceRules
from sealring.attest.evidence.snp import parse_report
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.credential import seal_credential
from sealring.attest.evidence.tpm.machine import DEVICE, QUOTED, TpmMachine
from sealring.attest.evidence.tpm.structures import BANKS, parse_public
from sealring.attest.evidence.tpm.verify import registers
from sealring.attest.evidence.tsm import Answer, ask
from sealring.cli.terminal import console, print_json, say
from sealring.errors import AttestationError, AttestationUnavailable, ConfigurationError
from sealring.formats.files import write_public

_DEVICES: Final = {
    "snp": "/dev/sev-guest",
    "tdx": "/dev/tdx_guest",
    "sgx": "/dev/sgx_enclave",
    "nvidia": "/dev/nvidiactl",
}


def attest(
    tpm: Annotated[str, typer.Option(help="The TPM: a device, or a simulator's socket.")] = DEVICE,
    out: Annotated[
        Path | None,
        typer.Option(help="Write evidence there, made as SEALRING_ATTESTER says, to try a policy."),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="With --out: show the GPUs too.")] = False,
    ima: Annotated[
        bool,
        typer.Option("--ima", help="With --out: show the measured files too (IMA)."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the hardware here that signs evidence, and what it would show today.

    What is shown is what the hardware says of itself, for writing a policy: nothing of it was
    verified, and only verified evidence proves anything. With --out, evidence is written to a file,
    for `sealring policy check` and `sealring policy new`: made for a nonce of its own, so that no
    broker takes it.
    """
    if out is not None:
        _write(out, gpus, ima, tpm, json)
        return
    if gpus or ima:
        raise ConfigurationError("--gpus and --ima are for the evidence that --out writes")
    found = [_row(kind, device, Path(device).exists()) for kind, device in _DEVICES.items()]
    found.append(_row("tpm", tpm, "://" in tpm or Path(tpm).exists()))
    for row in found:
        if row["present"]:
            row |= _ask(row["kind"], row["device"])
    if json:
        print_json({"hardware": found, "simulated": "SIMULATED"})
        return
    table = Table(title="What this machine could prove")
    for column in ("kind", "device", "present", "sealring can judge it", "note"):
        table.add_column(column)
    for row in found:
        judged = "yes" if row["verifier"] else "not in this version"
        present = "yes" if row["present"] else "no"
        table.add_row(row["kind"], row["device"], present, judged, row["note"])
    console.print(table)
    for row in found:
        for name, value in row["shows"].items():
            console.print(f"{row['kind']} {name} = {value}", highlight=False, soft_wrap=True)


def _write(out: Path, gpus: bool, ima: bool, tpm: str, json: bool) -> None:
    environ = {**os.environ} if tpm == DEVICE else {**os.environ, "SEALRING_TPM": tpm}
    devices = DeviceRules() if gpus else None
    attester = find_attester(environ, Policy({}, devices=devices), ima=ima)
    public_key = Ed25519PrivateKey.generate().public_key()
    key = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    extra = _credential(attester.introduce())
    content = attester.attest(secrets.token_bytes(NONCE_BYTES), key, extra).encode()
    write_public(out, content)
    shown = {"kind": attester.kind, "out": str(out), "bytes": len(content)}
    if json:
        print_json(shown)
        return
    say(f"{out}: {attester.kind} evidence, for a nonce of its own. No broker takes it; try it with")
    say(f"  sealring policy new --evidence {out}")
    say(f"  sealring policy check POLICY {out}")


def _credential(introduction: dict[str, Any]) -> dict[str, Any]:
    """A TPM's exchange with its verifier, both played here: it proves nothing to others."""
    if not introduction:
        return {}
    certificate, ak = (
        base64.b64decode(one) for one in (introduction["chain"][0], introduction["ak"])
    )
    endorsement = load_certificate(certificate).public_key()
    blob = seal_credential(endorsement, parse_public(ak).name, secrets.token_bytes(32))
    return {"credential": base64.b64encode(blob).decode()}


def _row(kind: str, device: str, present: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "device": device,
        "present": present,
        "verifier": kind in {*KINDS, *DEVICE_KINDS},
        "note": "",
        "shows": {},
    }


def _ask(kind: str, device: str) -> dict[str, Any]:
    questions: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "tpm": _tpm,
        "snp": _guest,
        "tdx": _guest,
    }
    if kind not in questions:
        return {}
    try:
        return questions[kind](device)
    except (AttestationError, AttestationUnavailable) as problem:
        return {"note": str(problem)}


def _tpm(address: str) -> dict[str, Any]:
    with Tpm.open(address) as tpm:
        bank = tpm.bank()
        values, size = tpm.read_pcrs(QUOTED, bank), BANKS[bank]
        shows = registers({pcr: values[size * n :][:size] for n, pcr in enumerate(QUOTED)})
        try:
            TpmMachine(tpm, ())
        except (AttestationError, AttestationUnavailable) as problem:
            # A TPM whose maker did not certify it proves nothing to others.
            return {"note": str(problem), "shows": shows}
    return {"note": "its maker certified it", "shows": shows}


def _guest(_: str) -> dict[str, Any]:
    answer = ask(bytes(64))
    return {"shows": {"measurement": _measurement(answer).hex()}}


def _measurement(answer: Answer) -> bytes:
    if answer.kind == TDX:
        body = 48 + (6 if answer.report[:1] == b"\x05" else 0)
        return answer.report[body + 136 : body + 184]  # MRTD
    return parse_report(answer.report).measurement
