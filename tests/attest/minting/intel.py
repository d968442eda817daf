"""A stand-in for Intel: root, platform and quoting keys, and its signed statements."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import Challenge, Evidence, Trust
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.trust import Collateral, parse_collateral
from tests.attest.minting import CHALLENGE, DAY, NOW, Holder, issue, pem, sign

MRTD: Final = b"\x5a" * 48
MRENCLAVE, MRSIGNER = b"\x5a" * 32, b"\x5b" * 32
PPID: Final = bytes(range(16))
FMSPC: Final = bytes.fromhex("00906ED50000")
_SGX: Final = "1.2.840.113741.1.13.1"
_VENDOR: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_QE_SIGNER: Final = bytes.fromhex(
    "dc9e2a7c6f948f17474e34a7fc43ed030f7c1563f1babddf6340c82e0e54a8c5"
)
_SVN: Final = 5
_ENCLAVE_BYTES, _TD_BYTES, _TD_15_BYTES = 384, 584, 648


class Intel:
    def __init__(self, *, pck_days: int = 100, ppid: bytes = PPID) -> None:
        curve = ec.SECP256R1()
        self.root = issue("Intel SGX Root CA", None, ca=True, curve=curve)
        self.platform = issue("Intel SGX PCK Platform CA", self.root, ca=True, curve=curve)
        self.pck = self._platform_key(ppid, pck_days)
        self.tcb_signer = issue(
            "Intel SGX TCB Signing", self.root, ca=False, curve=curve, usage=["digital_signature"]
        )
        self.attestation_key = ec.generate_private_key(curve)

    def _platform_key(self, ppid: bytes, days: int = 100) -> Holder:
        return issue(
            "Intel SGX PCK Certificate",
            self.platform,
            ca=False,
            curve=ec.SECP256R1(),
            days=days,
            usage=["digital_signature"],
            extensions=[x509.UnrecognizedExtension(x509.ObjectIdentifier(_SGX), _platform(ppid))],
        )

    def another(self, ppid: bytes) -> Intel:
        """Another machine of the same family, with the same authorities above it."""
        other = copy.copy(self)
        other.pck = self._platform_key(ppid)
        other.attestation_key = ec.generate_private_key(ec.SECP256R1())
        return other

    def trust(self, *collateral: Collateral, now: datetime = NOW) -> Trust:
        known = collateral or (self.collateral(),)
        return Trust(now, intel=frozenset({self.root.fingerprint}), collateral=known)

    def evidence(
        self,
        kind: str = "tdx",
        challenge: Challenge = CHALLENGE,
        devices: tuple[DeviceEvidence, ...] = (),
        **changes: Any,
    ) -> Evidence:
        bound = challenge.report_data(kind, devices)
        make = tdx_body if kind == "tdx" else sgx_body
        return Evidence(kind, challenge, {"quote": self.quote(make(bound, **changes))}, (), devices)

    def quote(
        self, body: bytes, version: int | None = None, *, shown: Holder | None = None
    ) -> bytes:
        """A quote of SGX (version 3), TDX 1.0 (4 or 5) or TDX 1.5 (5). The body's length decides.

        `shown` is another machine's key, whose certificate the quote then holds instead of ours.
        """
        tdx = len(body) != _ENCLAVE_BYTES
        number = version or {_ENCLAVE_BYTES: 3, _TD_BYTES: 4, _TD_15_BYTES: 5}[len(body)]
        head = _le(number, 2) + _le(2, 2) + _le(0x81 if tdx else 0, 4) + bytes(4)
        head += _VENDOR + bytes(20)
        if number == 5:
            form = 2 if len(body) == _TD_BYTES else 3
            body = _le(form, 2) + _le(len(body), 4) + body
        own = _point(self.attestation_key)
        extra = b"quoting enclave".ljust(32, b"\0")
        qe = _enclave(bytes(32), _QE_SIGNER, 2, 4, hashlib.sha256(own + extra).digest() + bytes(32))
        certified = qe + _sign(self.pck.key, qe) + _le(len(extra), 2) + extra
        chain = pem(shown or self.pck, self.platform, self.root).encode()
        certified += _le(5, 2) + _le(len(chain), 4) + chain
        if tdx:
            certified = _le(6, 2) + _le(len(certified), 4) + certified
        signature = _sign(self.attestation_key, head + body) + own + certified
        return head + body + _le(len(signature), 4) + signature

    def collateral(
        self,
        kind: str = "tdx",
        *,
        status: str = "UpToDate",
        least: int = _SVN,
        revoked: tuple[Holder, ...] = (),
        days_old: int = 1,
        days_left: int = 10,
        signer: Holder | None = None,
        with_pck: bool = False,
    ) -> Collateral:
        """`with_pck` adds this machine's certificates, as `dcap_qvl.get_collateral` does."""
        issued, until = NOW - days_old * DAY, NOW + days_left * DAY
        dates = {"issueDate": _date(issued), "nextUpdate": _date(until)}
        shared = {**dates, "tcbEvaluationDataNumber": 17}
        anything = {"attributes": "00" * 8, "attributesMask": "FF" * 8, "mrsigner": "00" * 48}
        svns = [{"svn": least}] + [{"svn": 0}] * 15
        level = {"sgxtcbcomponents": svns, "pcesvn": least}
        tcb: dict[str, Any] = {"id": kind.upper(), "version": 3, **shared}
        tcb |= {"fmspc": FMSPC.hex().upper(), "pceId": "0000", "tcbType": 0}
        if kind == "tdx":
            level["tdxtcbcomponents"] = svns
            tcb |= {"tdxModule": anything, "tdxModuleIdentities": []}
        tcb["tcbLevels"] = [{"tcb": level, "tcbDate": _date(issued), "tcbStatus": status}]
        qe = {
            "id": "TD_QE" if kind == "tdx" else "QE",
            "version": 2,
            **shared,
            "miscselect": "00000000",
            "miscselectMask": "FFFFFFFF",
            "attributes": "11" + "00" * 15,
            "attributesMask": "FB" + "FF" * 7 + "00" * 8,
            "mrsigner": _QE_SIGNER.hex().upper(),
            "isvprodid": 2,
            "tcbLevels": [
                {"tcb": {"isvsvn": 4}, "tcbDate": _date(issued), "tcbStatus": "UpToDate"}
            ],
        }
        tcb_text, qe_text = (json.dumps(one, separators=(",", ":")) for one in (tcb, qe))
        by = signer or self.tcb_signer
        lists = [
            one.revocation_list(
                *(gone.certificate for gone in revoked), days_old=days_old, days_left=days_left
            ).public_bytes(Encoding.DER)
            for one in (self.root, self.platform)
        ]
        own = pem(self.pck, self.platform, self.root)
        return parse_collateral(
            json.dumps(
                {
                    "pck_crl_issuer_chain": pem(self.platform, self.root),
                    "root_ca_crl": lists[0].hex(),
                    "pck_crl": lists[1].hex(),
                    "tcb_info_issuer_chain": pem(self.tcb_signer, self.root),
                    "tcb_info": tcb_text,
                    "tcb_info_signature": _sign(by.key, tcb_text.encode()).hex(),
                    "qe_identity_issuer_chain": pem(self.tcb_signer, self.root),
                    "qe_identity": qe_text,
                    "qe_identity_signature": _sign(by.key, qe_text.encode()).hex(),
                    **({"pck_certificate_chain": own} if with_pck else {}),
                }
            )
        )


def tdx_body(
    report_data: bytes,
    *,
    measurement: bytes = MRTD,
    attributes: int = 1 << 28,
    svn: int = _SVN,
    rtmrs: Mapping[int, bytes] | None = None,
) -> bytes:
    body = bytes([svn]).ljust(16, b"\0") + bytes(48 + 48 + 8) + _le(attributes, 8)
    body += bytes.fromhex("e702060000000000") + measurement + bytes(3 * 48)
    held = {n: bytes([0xA0 + n]) * 48 for n in range(4)} | dict(rtmrs or {})
    return body + b"".join(held[n] for n in range(4)) + report_data


def sgx_body(
    report_data: bytes,
    *,
    measurement: bytes = MRENCLAVE,
    signer: bytes = MRSIGNER,
    flags: int = 5,
    svn: int = 3,
) -> bytes:
    return _enclave(measurement, signer, 7, svn, report_data, flags)


def _enclave(
    measurement: bytes, signer: bytes, product: int, svn: int, data: bytes, flags: int = 0x11
) -> bytes:
    body = bytes([_SVN]).ljust(16, b"\0") + bytes(4 + 28) + _le(flags, 8) + bytes(8)
    body += measurement + bytes(32) + signer + bytes(96) + _le(product, 2) + _le(svn, 2)
    return body + bytes(60) + data


def _platform(ppid: bytes) -> bytes:
    """The PCK certificate's extension, with the platform's identity and its TCB."""

    def field(number: str, value: bytes) -> bytes:
        oid = x509.ObjectIdentifier(f"{_SGX}.{number}")
        return _der(0x30, _oid(oid) + value)

    svns = [_SVN] + [0] * 15
    tcb = b"".join(field(f"2.{n}", _der(2, bytes([svn]))) for n, svn in enumerate(svns, 1))
    tcb += field("2.17", _der(2, bytes([_SVN]))) + field("2.18", _der(4, bytes(svns)))
    return _der(
        0x30,
        field("1", _der(4, ppid))
        + field("2", _der(0x30, tcb))
        + field("3", _der(4, bytes(2)))
        + field("4", _der(4, FMSPC))
        + field("5", _der(10, b"\0")),
    )


def _oid(oid: x509.ObjectIdentifier) -> bytes:
    first, second, *rest = map(int, oid.dotted_string.split("."))
    body = bytes([40 * first + second])
    for number in rest:
        digits = [number & 0x7F]
        while number := number >> 7:
            digits.append(number & 0x7F | 0x80)
        body += bytes(reversed(digits))
    return _der(6, body)


def _der(tag: int, body: bytes) -> bytes:
    size = len(body)
    length = bytes([size]) if size < 128 else bytes([0x82]) + size.to_bytes(2, "big")
    return bytes([tag]) + length + body


def _sign(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    r, s = sign(key, message)
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _point(key: ec.EllipticCurvePrivateKey) -> bytes:
    numbers = key.public_key().public_numbers()
    return numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")


def _le(number: int, size: int) -> bytes:
    return number.to_bytes(size, "little")


def _date(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"
