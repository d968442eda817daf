"""`sealring attest`: what this machine could prove about itself, by the devices it has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from sealring.cli.terminal import console, print_json
from sealring.errors import AttestationError, TpmFailed
from sealring.identity.attestation.tpm.commands import Tpm
from sealring.identity.attestation.tpm.machine import DEVICE, TpmMachine
from sealring.identity.attestation.verify import DEVICE_VERIFIERS, VERIFIERS

_DEVICES: Final = {
    "snp": "/dev/sev-guest",
    "tdx": "/dev/tdx_guest",
    "sgx": "/dev/sgx_enclave",
    "tpm": DEVICE,
    "nvidia": "/dev/nvidiactl",
}


def attest(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the hardware here that signs evidence, and whether this sealring can judge it.

    A device says nothing about how the machine is set up: only verified evidence does.
    """
    found = [
        {
            "kind": kind,
            "device": device,
            "present": Path(device).exists(),
            "verifier": kind in {*VERIFIERS, *DEVICE_VERIFIERS},
            "note": _tpm() if kind == "tpm" and Path(device).exists() else "",
        }
        for kind, device in _DEVICES.items()
    ]
    if json:
        print_json(
            {"hardware": found, "simulated": "SIMULATED" if "simulated" in VERIFIERS else None}
        )
        return
    table = Table(title="What this machine could prove")
    for column in ("kind", "device", "present", "sealring can judge it", "note"):
        table.add_column(column)
    for row in found:
        table.add_row(
            str(row["kind"]),
            str(row["device"]),
            "yes" if row["present"] else "no",
            "yes" if row["verifier"] else "not in this version",
            str(row["note"]),
        )
    console.print(table)


def _tpm() -> str:
    """A TPM whose maker did not certify it proves nothing to others."""
    try:
        with Tpm.open(DEVICE) as tpm:
            TpmMachine(tpm, ())
    except (TpmFailed, AttestationError) as problem:
        return str(problem)
    return "its maker certified it"
