"""A stand-in for NVIDIA: the chain of one device, its reports, and reference measurements."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from cryptography import x509

from sealring.attest.evidence import Trust
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.nvidia_reference import Reference, verify_reference
from tests.attest.minting import NOW, Holder, issue, pem, sign

FIRMWARE: Final = b"\xf1" * 48
DRIVER, VBIOS = "590.12", "96.00.A5.00.01"
MEASUREMENTS: Final = {n: bytes([n]) * 48 for n in range(64)}
SWITCH: Final = bytes(range(1, 9))
_DIGEST: Final = bytes.fromhex("303d06096086480165030402020430")


class Nvidia:
    def __init__(
        self,
        model: str = "GH100",
        *,
        serial: str = "48B02D92494BADF4",
        firmware: bytes = FIRMWARE,
        firmware_oid: str = "2.23.133.5.4.1",
        leaf_days: int = 100,
        root: Holder | None = None,
    ) -> None:
        self.model = model
        self.root = root or issue("NVIDIA Device Identity CA", None, ca=True)
        self.identity = issue(f"NVIDIA {model} Identity", self.root, ca=True)
        self.provisioner = issue(f"NVIDIA {model} Provisioner ICA 1", self.identity, ca=True)
        self.boot = issue(f"{model} A01 GSP BROM", self.provisioner, ca=True)
        name = f"NVIDIA:{model}:{serial}".encode()
        other = x509.OtherName(
            x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1"), b"\x0c" + bytes([len(name)]) + name
        )
        self.device = issue(
            f"{model} A01 GSP FMC LF",
            self.boot,
            ca=False,
            days=leaf_days,
            usage=["digital_signature"],
            extensions=[
                x509.SubjectAlternativeName([other]),
                x509.UnrecognizedExtension(
                    x509.ObjectIdentifier(firmware_oid), b"\x30\x3f" + _DIGEST + firmware
                ),
            ],
        )
        self.reference_root = issue("NVIDIA CoRIM signing Root CA", None, ca=True)
        self.reference_signer = issue(
            "HCC RIM L4 Signer", self.reference_root, ca=False, usage=["digital_signature"]
        )

    @property
    def chain(self) -> tuple[bytes, ...]:
        above = (self.device, self.boot, self.provisioner, self.identity, self.root)
        return tuple(one.der for one in above)

    def trust(
        self,
        *references: Reference,
        now: datetime = NOW,
        lists: tuple[x509.CertificateRevocationList, ...] = (),
    ) -> Trust:
        roots = frozenset({self.root.fingerprint})
        return Trust(now, nvidia=roots, references=references, lists=lists)

    def evidence(self, nonce: bytes, **changes: Any) -> DeviceEvidence:
        return DeviceEvidence("nvidia", {"report": self.report(nonce, **changes)}, self.chain)

    def report(
        self,
        nonce: bytes,
        *,
        measurements: Mapping[int, bytes] = MEASUREMENTS,
        opaque: Mapping[int, bytes] | None = None,
        version: int = 0x11,
    ) -> bytes:
        blocks = b"".join(
            bytes([index + 1, 1]) + _sized(b"\x01" + _sized(value))
            for index, value in measurements.items()
        )
        fields = own_fields(self.model) if opaque is None else opaque
        own = b"".join(_le(field, 2) + _sized(value) for field, value in fields.items())
        signed = bytes([version, 0xE0, 1, 0xFF]) + nonce + b"\0"
        signed += bytes([version, 0x60, 0, 0, len(measurements)]) + _le(len(blocks), 3) + blocks
        signed += b"\x99" * 32 + _sized(own)
        r, s = sign(self.device.key, signed)
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def reference_file(
        self,
        version: str,
        measurements: Mapping[int, bytes],
        *,
        active: bool = True,
        signer: Holder | None = None,
    ) -> bytes:
        """Signed XML, as NVIDIA's service gives it out."""
        from lxml import etree
        from signxml.algorithms import (
            CanonicalizationMethod,
            DigestAlgorithm,
            SignatureConstructionMethod,
            SignatureMethod,
        )
        from signxml.signer import XMLSigner

        resources = "".join(
            f'<r:Resource type="Measurement" index="{index}" active="{active}" alternatives="1" '
            f'h:Hash0="{value.hex()}" name="Measurement_{index}" size="48"/>'
            for index, value in measurements.items()
        )
        text = (
            '<SoftwareIdentity xmlns="http://standards.iso.org/iso/19770/-2/2015/schema.xsd" '
            'xmlns:r="http://standards.iso.org/iso/19770/-2/2015/schema.xsd" '
            f'xmlns:h="http://www.w3.org/2001/04/xmlenc#sha384" name="{self.model}" tagId="1">'
            f'<r:Meta colloquialVersion="{version}" product="{self.model}"/>'
            f"<r:Payload>{resources}</r:Payload></SoftwareIdentity>"
        )
        by = signer or self.reference_signer
        signed = XMLSigner(
            method=SignatureConstructionMethod.enveloped,
            signature_algorithm=SignatureMethod.ECDSA_SHA384,
            digest_algorithm=DigestAlgorithm.SHA384,
            c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_1,
        ).sign(etree.fromstring(text.encode()), key=by.key, cert=pem(by, self.reference_root))
        done: bytes = etree.tostring(signed)
        return done

    def reference(self, data: bytes, now: datetime = NOW) -> Reference:
        return verify_reference(data, Trust(now), frozenset({self.reference_root.fingerprint}))

    def references(self) -> tuple[Reference, ...]:
        """References of the driver and the VBIOS in `report`, each with half the measurements."""
        if self.model.startswith("LS"):
            halves = {VBIOS: MEASUREMENTS}
        else:
            halves = {
                DRIVER: {n: v for n, v in MEASUREMENTS.items() if n % 2},
                VBIOS: {n: v for n, v in MEASUREMENTS.items() if not n % 2},
            }
        return tuple(
            self.reference(self.reference_file(version, values))
            for version, values in halves.items()
        )


def own_fields(model: str, gpus: int = 1) -> dict[int, bytes]:
    if model.startswith("LS"):
        linked = b"".join(bytes([0x90 + n]) * 8 for n in range(gpus)).ljust(64, b"\0")
        ports = bytes(port % gpus if port < 36 else 0xFF for port in range(64))
        return {6: VBIOS.encode(), 22: SWITCH, 26: linked + ports}
    return {
        6: bytes.fromhex("00a5009601000000"),
        3: DRIVER.encode() + b"\0",
        11: b"\xaa",
        20: FIRMWARE,
        22: SWITCH[::-1] * 18,
    }


def _sized(data: bytes) -> bytes:
    return _le(len(data), 2) + data


def _le(number: int, size: int) -> bytes:
    return number.to_bytes(size, "little")
