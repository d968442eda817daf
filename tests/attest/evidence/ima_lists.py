"""Makes lists of measured files as Linux writes them (binary_runtime_measurements)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sealring.attest.evidence.tpm.commands import Tpm
from tests.attest.evidence import swtpm


@dataclass(frozen=True)
class File:
    path: str
    content: bytes = b""
    template: str = "ima-ng"
    violation: bool = False
    algorithm: str = "sha256"
    more: bytes = b""
    """The third field, for the templates that have one: a signature or a buffer."""
    pcr: int = 10

    @property
    def digest(self) -> bytes:
        found = hashlib.new(self.algorithm, self.content).digest()
        return bytes(len(found)) if self.violation else found

    @property
    def data(self) -> bytes:
        fields = [self.algorithm.encode() + b":\0" + self.digest, self.path.encode() + b"\0"]
        if self.template in ("ima-sig", "ima-buf"):
            fields.append(self.more)
        return b"".join(sized(one) for one in fields)

    @property
    def entry(self) -> bytes:
        own = bytes(20) if self.violation else hashlib.sha1(self.data).digest()
        head = self.pcr.to_bytes(4, "little") + own
        return head + sized(self.template.encode()) + sized(self.data)

    def extended(self, bank: str = "sha256") -> bytes:
        """The digest with which the kernel extends the PCR."""
        hashed = hashlib.new(bank, self.data).digest()
        return b"\xff" * len(hashed) if self.violation else hashed


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def listed(*files: File) -> bytes:
    return b"".join(one.entry for one in files)


def value_of(*files: File, bank: str = "sha256") -> bytes:
    value = bytes(hashlib.new(bank).digest_size)
    for one in files:
        value = hashlib.new(bank, value + one.extended(bank)).digest()
    return value


def measure(tpm: Tpm, *files: File) -> None:
    """Extends a real TPM as the kernel does."""
    for one in files:
        swtpm.extend(tpm, 10, one.extended())


PYTHON = File("/usr/bin/python3.11", b"python")
TORCH = File("/usr/lib/libtorch.so", b"torch", template="ima-sig", more=b"\3\2\4signature")
KEY = File(".ima", b"a key", template="ima-buf", more=b"a key")
EVIL = File("/usr/bin/evil", b"evil")
PCRS = {pcr: bytes([pcr]) * 32 for pcr in range(10)}
BOOTED = File("boot_aggregate", b"".join(PCRS[pcr] for pcr in range(10)))
GOOD = (BOOTED, PYTHON, TORCH, KEY)


def quoted(*files: File) -> dict[int, bytes]:
    return {**PCRS, 10: value_of(*files)}
