"""`sealring attest`: what this machine could prove about itself, by the devices it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from sealring.cli.terminal import console, print_json
from sealring.errors import AttestationError, AttestationUnavailable
from sealring.identity.attestation.intel import TDX
from sealring.identity.attestation.snp import parse_report
from sealring.identity.attestation.tpm.commands import Tpm
from sealring.identity.attestation.tpm.machine import DEVICE, QUOTED, TpmMachine
from sealring.identity.attestation.tpm.structures import BANKS
from sealring.identity.attestation.tpm.verify import registers
from sealring.identity.attestation.tsm import Answer, ask
from sealring.identity.attestation.verify import DEVICE_VERIFIERS, VERIFIERS

_DEVICES: Final = {
    "snp": "/dev/sev-guest",
    "tdx": "/dev/tdx_guest",
    "sgx": "/dev/sgx_enclave",
    "nvidia": "/dev/nvidiactl",
}


def attest(
    tpm: Annotated[str, typer.Option(help="The TPM: a device, or a simulator's socket.")] = DEVICE,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the hardware here that signs evidence, and what it would show today.

    What is shown is what the hardware says of itself, for writing a policy: nothing of it was
    verified, and only verified evidence proves anything.
    """
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


def _row(kind: str, device: str, present: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "device": device,
        "present": present,
        "verifier": kind in {*VERIFIERS, *DEVICE_VERIFIERS},
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
