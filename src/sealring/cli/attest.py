"""`sealring attest`: what this machine could prove about itself, by the devices it has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from sealring.cli.terminal import console, print_json
from sealring.identity.attestation.verify import VERIFIERS

_DEVICES: Final = {
    "snp": "/dev/sev-guest",
    "tdx": "/dev/tdx_guest",
    "sgx": "/dev/sgx_enclave",
    "tpm": "/dev/tpmrm0",
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
            "verifier": kind in VERIFIERS,
        }
        for kind, device in _DEVICES.items()
    ]
    if json:
        print_json(
            {"hardware": found, "simulated": "SIMULATED" if "simulated" in VERIFIERS else None}
        )
        return
    table = Table(title="What this machine could prove")
    for column in ("kind", "device", "present", "sealring can judge it"):
        table.add_column(column)
    for row in found:
        table.add_row(
            str(row["kind"]),
            str(row["device"]),
            "yes" if row["present"] else "no",
            "yes" if row["verifier"] else "not in this version",
        )
    console.print(table)
