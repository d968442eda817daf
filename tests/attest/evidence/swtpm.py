"""A software TPM: Debian's swtpm, one process per test module, over its own socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sealring.attest.evidence.tpm.commands import OWNER, PASSWORD, Tpm
from sealring.attest.evidence.tpm.structures import SHA256

needs_swtpm = pytest.mark.skipif(
    shutil.which("swtpm") is None, reason="swtpm is not installed (make system-deps)"
)


@contextmanager
def running(state: Path | None = None) -> Iterator[str]:
    """Yields the address of a TPM that has just been switched on."""
    # A socket's path must be short, and pytest's folders have long paths.
    with tempfile.TemporaryDirectory(prefix="swtpm-") as folder:
        server = Path(folder) / "server"
        process = subprocess.Popen(
            [
                "swtpm", "socket", "--tpm2",
                "--tpmstate", f"dir={state or folder}",
                "--server", f"type=unixio,path={server}",
                "--ctrl", f"type=unixio,path={folder}/control",
                "--flags", "not-need-init,startup-clear",
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not _answers(server):
                assert process.poll() is None, "swtpm ended before it served"
                time.sleep(0.01)
            yield f"unix://{server}"
        finally:
            process.kill()
            process.wait()


def _answers(server: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(server)) == 0


def extend(tpm: Tpm, pcr: int, digest: bytes) -> None:
    values = (1).to_bytes(4, "big") + SHA256.to_bytes(2, "big") + digest
    tpm.call("PCR_Extend", 0x182, (pcr,), (PASSWORD,), values)


def reset(tpm: Tpm, pcr: int) -> None:
    tpm.call("PCR_Reset", 0x13D, (pcr,), (PASSWORD,))


def store(tpm: Tpm, index: int, data: bytes) -> None:
    """Stores data as a maker stores an EK's certificate: everybody may read it."""
    # AUTHREAD, OWNERREAD, OWNERWRITE, AUTHWRITE, NO_DA
    attributes = 1 << 18 | 1 << 17 | 1 << 1 | 1 << 2 | 1 << 25
    public = index.to_bytes(4, "big") + SHA256.to_bytes(2, "big") + attributes.to_bytes(4, "big")
    public += bytes(2) + len(data).to_bytes(2, "big")
    defined = bytes(2) + len(public).to_bytes(2, "big") + public
    tpm.call("NV_DefineSpace", 0x12A, (OWNER,), (PASSWORD,), defined)
    for at in range(0, len(data), 512):
        part = data[at : at + 512]
        body = len(part).to_bytes(2, "big") + part + at.to_bytes(2, "big")
        tpm.call("NV_Write", 0x137, (index, index), (PASSWORD,), body)
