"""NVIDIA's reference measurements (RIM): signed XML with the measurements of a driver or VBIOS.

The files are fetched from NVIDIA beforehand and lie on the verifier's machine. A file's signature
is verified once, when it is read; its dates are checked at each use.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from datetime import datetime
from types import ModuleType
from typing import Any, Final

from cryptography import x509

from sealring.attest.evidence.chains import (
    NVIDIA_REFERENCE_ROOTS,
    ChainContext,
    ListSeen,
    VerifiedChain,
    extension_of,
    out_of_dates,
    verify_chain,
)
from sealring.errors import ConfigurationError, ForgedEvidence, MalformedEvidence, UntrustedChain

_SEAL: Final = object()
_SWID: Final = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
_DSIG: Final = "{http://www.w3.org/2000/09/xmldsig#}"
_HASH: Final = "{http://www.w3.org/2001/04/xmlenc#sha384}Hash"
_DIGEST: Final = re.compile(r"[0-9a-f]{96}")
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Reference:
    """The measurements of one driver or VBIOS. Only `verify_reference` can make it."""

    version: str
    """The version of the driver or the VBIOS."""
    model: str
    measurements: Mapping[int, frozenset[bytes]]
    """The accepted values by index. Measurements that the file marks as inactive are left out."""
    not_before: datetime
    not_after: datetime
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    """Like `VerifiedChain.unlisted`, for the signer's chain."""
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a Reference comes from verify_reference only")

    def check_dates(self, now: datetime) -> None:
        if not self.not_before <= now <= self.not_after:
            start, end = f"{self.not_before:%Y-%m-%d}", f"{self.not_after:%Y-%m-%d}"
            raise UntrustedChain(
                f"the reference measurements of {self.version} are signed for {start} to {end}, "
                f"not for {now:%Y-%m-%d}: "
                f"{out_of_dates(self.not_before, now, 'fetch them again')}",
                code="evidence.chain_expired",
            )


def verify_reference(
    data: bytes, context: ChainContext, roots: frozenset[str] = NVIDIA_REFERENCE_ROOTS
) -> Reference:
    """Verifies the file's signature, whose chain, inside the file, must lead to a pinned root."""
    etree, signxml = _packages()
    if len(data) > MAX_BYTES:
        raise MalformedEvidence(f"reference measurements have at most {MAX_BYTES} bytes")
    try:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=False)
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError):
        raise MalformedEvidence("the reference measurements are not XML") from None
    if root.getroottree().docinfo.doctype:
        raise MalformedEvidence("reference measurements have no document type")
    chain = verify_chain(_chain(root), roots, context)
    _check_signer(chain.leaf)
    signed = _signed(root, chain.leaf, context.now, signxml)
    return _read(signed, chain)


def _chain(root: Any) -> tuple[bytes, ...]:
    found = root.findall(f"{_DSIG}Signature/{_DSIG}KeyInfo/{_DSIG}X509Data/{_DSIG}X509Certificate")
    try:
        return tuple(base64.b64decode("".join((one.text or "").split())) for one in found)
    except ValueError:
        raise MalformedEvidence("a certificate of the reference measurements is none") from None


def _check_signer(leaf: x509.Certificate) -> None:
    usage = extension_of(leaf, x509.KeyUsage)
    signs = usage is not None and usage.digital_signature
    if not signs:
        raise UntrustedChain("the reference measurements' certificate is not one that signs")


def _signed(root: Any, leaf: x509.Certificate, now: datetime, signxml: ModuleType) -> Any:
    """The part of the file that the signature covers. Nothing else of the file is used."""
    expect = signxml.SignatureConfiguration(
        location="./",
        expect_references=1,
        signature_methods=frozenset({signxml.SignatureMethod.ECDSA_SHA384}),
        digest_algorithms=frozenset({signxml.DigestAlgorithm.SHA384}),
        verification_time=now,
    )
    try:
        verified = signxml.XMLVerifier().verify(root, x509_cert=leaf, expect_config=expect)
    except Exception as problem:  # strange XML may fail anywhere, and has then not verified
        raise ForgedEvidence(
            f"the reference measurements are not what NVIDIA signed: {type(problem).__name__}"
        ) from None
    if verified.signed_xml is None or verified.signed_xml.tag != f"{_SWID}SoftwareIdentity":
        raise ForgedEvidence("the signature does not cover the whole of the reference measurements")
    return verified.signed_xml


def _read(signed: Any, chain: VerifiedChain) -> Reference:
    meta, payload = signed.find(f"{_SWID}Meta"), signed.find(f"{_SWID}Payload")
    if meta is None or payload is None:
        raise MalformedEvidence("the reference measurements lack Meta or Payload")
    measurements: dict[int, frozenset[bytes]] = {}
    seen: set[int] = set()
    for one in payload:
        try:
            index, count = int(one.attrib["index"]), int(one.attrib["alternatives"])
            values = [one.attrib[f"{_HASH}{n}"] for n in range(min(count, 64))]
            active = {"True": True, "False": False}[one.attrib["active"]]
        except (KeyError, ValueError):
            raise MalformedEvidence("a reference measurement lacks a field") from None
        if index in seen or not values or not all(map(_DIGEST.fullmatch, values)):
            raise MalformedEvidence(f"reference measurement {index} comes twice, or is no SHA-384")
        seen.add(index)
        if active:
            measurements[index] = frozenset(map(bytes.fromhex, values))
    if not measurements:
        raise MalformedEvidence("the reference file holds no measurements")
    return Reference(
        version=meta.attrib.get("colloquialVersion", ""),
        model=meta.attrib.get("product", ""),
        measurements=measurements,
        not_before=max(one.not_valid_before_utc for one in chain.certificates),
        not_after=chain.not_after,
        lists=chain.lists,
        unlisted=chain.unlisted,
        seal=_SEAL,
    )


def _packages() -> tuple[ModuleType, ModuleType]:
    try:
        import signxml
        from lxml import etree
    except ImportError:
        raise ConfigurationError(
            "NVIDIA's reference measurements need signxml: pip install 'sealring[nvidia]'",
            code="configuration.missing_extra",
        ) from None
    return etree, signxml
