"""A stand-in for AMD: root, intermediate and one chip's key."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from cryptography import x509

from sealring.attest.evidence import Challenge, Evidence, Trust
from sealring.attest.evidence.evidence import DeviceEvidence
from tests.attest.minting import CHALLENGE, NOW, issue, sign

MEASUREMENT: Final = b"\x5a" * 48
CHIP: Final = bytes(range(64))
TCB: Final = {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115}
PLAIN_POLICY: Final = 0x30000
PLATFORM_INFO: Final = 0x25
"""SMT, error-correcting memory, and memory that was checked for aliases."""
_OIDS: Final = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
_LAYOUT: Final = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
_TURIN_LAYOUT: Final = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}


class Amd:
    def __init__(
        self,
        product: str = "Milan",
        *,
        vlek: bool = False,
        chip: bytes = CHIP,
        tcb: dict[str, int] = TCB,
        leaf_days: int = 100,
        ask_is_ca: bool = True,
        stated_product: str | None = None,
        critical: bool = False,
    ) -> None:
        self.product, self.vlek, self.tcb = product, vlek, tcb
        ask_name = f"SEV-VLEK-{product}" if vlek else f"SEV-{product}"
        self.root = issue(f"ARK-{product}", None, ca=True)
        self.signer = issue(ask_name, self.root, ca=ask_is_ca)
        stated = (stated_product or product).encode() + b"-B0"
        values = {"2": b"\x16" + bytes([len(stated)]) + stated}
        for name, value in tcb.items():
            body = value.to_bytes(2 if value > 127 else 1, "big")
            values[_OIDS[name]] = bytes([2, len(body)]) + body
        if not vlek:
            values["4"] = chip
        self.chip_key = issue(
            "SEV-VLEK" if vlek else "SEV-VCEK",
            self.signer,
            ca=False,
            days=leaf_days,
            extensions=[
                x509.UnrecognizedExtension(
                    x509.ObjectIdentifier(f"1.3.6.1.4.1.3704.1.{oid}"), value
                )
                for oid, value in values.items()
            ],
            critical=critical,
        )
        self.ark, self.ask, self.leaf = (
            one.certificate for one in (self.root, self.signer, self.chip_key)
        )

    @property
    def chain(self) -> tuple[bytes, ...]:
        return (self.chip_key.der, self.signer.der, self.root.der)

    def trust(
        self,
        *lists: x509.CertificateRevocationList,
        now: datetime = NOW,
        product: str | None = None,
    ) -> Trust:
        return Trust(now, amd={self.root.fingerprint: product or self.product}, lists=lists)

    def revocation_list(
        self, *revoked: x509.Certificate, days_old: int = 1, days_left: int = 10
    ) -> x509.CertificateRevocationList:
        return self.root.revocation_list(*revoked, days_old=days_old, days_left=days_left)

    def report(
        self,
        *,
        challenge: Challenge = CHALLENGE,
        policy: int = PLAIN_POLICY,
        tcb: dict[str, int] | None = None,
        chip: bytes | None = None,
        version: int = 2,
        vmpl: int = 0,
        algorithm: int = 1,
        measurement: bytes = MEASUREMENT,
        report_data: bytes | None = None,
        launch_tcb: dict[str, int] | None = None,
        platform_info: int = PLATFORM_INFO,
        guest_svn: int = 0,
        host_data: bytes = bytes(32),
        id_key: bytes = bytes(48),
        devices: tuple[DeviceEvidence, ...] = (),
    ) -> bytes:
        raw = bytearray(0x2A0)
        raw[0:4] = version.to_bytes(4, "little")
        raw[4:8] = guest_svn.to_bytes(4, "little")
        raw[8:16] = policy.to_bytes(8, "little")
        raw[0x30:0x34] = vmpl.to_bytes(4, "little")
        raw[0x34:0x38] = algorithm.to_bytes(4, "little")
        raw[0x40:0x48] = platform_info.to_bytes(8, "little")
        raw[0x48:0x4C] = (4 if self.vlek else 0).to_bytes(4, "little")
        bound = challenge.report_data("snp", devices)
        raw[0x50:0x90] = report_data or bound
        raw[0x90:0xC0] = measurement
        raw[0xC0:0xE0] = host_data
        raw[0xE0:0x110] = id_key
        layout = _TURIN_LAYOUT if self.product == "Turin" else _LAYOUT
        reported = tcb or self.tcb
        for at, parts in ((0x180, reported), (0x1F0, launch_tcb or reported)):
            for name, value in parts.items():
                raw[at + layout[name]] = value
        own = b"" if self.vlek else (chip if chip is not None else CHIP)
        raw[0x1A0:0x1E0] = own.ljust(64, b"\0")
        r, s = sign(self.chip_key.key, bytes(raw))
        return bytes(raw) + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)

    def evidence(
        self, report: bytes | None = None, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        raw = report or self.report(devices=devices)
        return Evidence("snp", CHALLENGE, {"report": raw}, self.chain, devices)
