"""A GPU's or switch's report: signed by a key that NVIDIA's root leads to, for this nonce.

What it measured is held against NVIDIA's references for its driver and VBIOS. What differs is told,
not refused here: the policy says whether that may be.
"""

from __future__ import annotations

from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from sealring.attest.evidence.chains import VerifiedChain, verify_chain
from sealring.attest.evidence.ecdsa import check_spelling
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.nvidia.spdm import (
    DRIVER,
    FEATURES,
    FWID,
    NVDEC0,
    PROTECTED_PCIE,
    SIGNATURE_BYTES,
    SWITCH_GPUS,
    SWITCHES,
    Report,
    canonical_report,
    parse_report,
)
from sealring.attest.evidence.nvidia_reference import Reference
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import AttestedDevice
from sealring.errors import ForgedEvidence, MalformedEvidence, NotBound, UnknownEvidence

KIND: Final = "nvidia"
GPUS: Final = frozenset({"GH100", "GB100", "GB102", "GB202", "GB203", "GB205", "GB206", "GB207"})
NVSWITCHES: Final = frozenset({"LS_10"})
_DEVICE_NAME: Final = x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1")
_FIRMWARE_IDS: Final = tuple(
    x509.ObjectIdentifier(oid) for oid in ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
)
# SEQUENCE of the OID of SHA-384 and 48 bytes, as a DICE certificate writes a firmware's hash.
_SHA384_DIGEST: Final = bytes.fromhex("303d06096086480165030402020430")
_NVDEC0_OFF: Final = b"\x55"
_NVDEC0_MEASUREMENT: Final = 35
_IDENTITY_BYTES: Final = 8
# A switch lists this many GPUs (zeros: none), then for each port the place of its GPU in that list.
_SWITCH_GPUS: Final = 8
_PROTECTED_PCIE_OFF: Final = b"\x55"
_PROTECTED_PCIE_FEATURE: Final = 2


def verify_nvidia(evidence: DeviceEvidence, nonce: bytes | None, trust: Trust) -> AttestedDevice:
    (raw,) = evidence.only("report")
    check_spelling(raw, canonical_report(raw), "the device's report")
    report, chain, model = verify_report(raw, evidence.chain, trust)
    if nonce is not None and report.nonce != nonce:
        raise NotBound("the device's report was made for another machine, worker or time")
    is_switch = model in NVSWITCHES
    firmware = {"vbios": report.vbios}
    if not is_switch:
        firmware["driver"] = report.text(DRIVER)
    fitting = _fitting(report, model, firmware, trust)
    references = tuple(fitting.values())
    return AttestedDevice(
        kind=KIND,
        model=model,
        is_switch=is_switch,
        identity=_name(chain.leaf),
        firmware=firmware,
        reference=tuple(f"{one.model} {one.version}" for one in references),
        unreferenced=tuple(sorted(set(firmware) - set(fitting))),
        mismatches=_mismatches(report, references),
        protected_pcie=not is_switch and _protected_pcie(report),
        switches=_switches(report, reverse=not is_switch),
        gpus=_gpus_of_switch(report) if is_switch else (),
        lists=(*chain.lists, *(seen for one in references for seen in one.lists)),
        unlisted=(*chain.unlisted, *(issuer for one in references for issuer in one.unlisted)),
        not_after=chain.not_after,
    )


def verify_report(
    raw: bytes, chain: tuple[bytes, ...], trust: Trust
) -> tuple[Report, VerifiedChain, str]:
    """That a device of NVIDIA's signed these bytes; not yet for whom. Its model comes too."""
    report = parse_report(raw)
    verified = verify_chain(chain, trust.nvidia, trust)
    key = verified.leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ForgedEvidence("the device's key is not on P-384")
    half = SIGNATURE_BYTES // 2
    r, s = (
        int.from_bytes(part, "big") for part in (report.signature[:half], report.signature[half:])
    )
    try:
        key.verify(encode_dss_signature(r, s), report.signed, ec.ECDSA(SHA384()))
    except InvalidSignature:
        raise ForgedEvidence("the report is not signed by the key of its certificate") from None
    _check_firmware(report, verified.leaf)
    model = _name(verified.leaf).split(":")[1]
    if model not in GPUS | NVSWITCHES:
        raise UnknownEvidence(f"NVIDIA devices of model {model} are not known")
    return report, verified, model


def _name(leaf: x509.Certificate) -> str:
    """NVIDIA:GH100:48B02D92494BADF4, as SPDM has devices name themselves."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise ForgedEvidence("the device's certificate does not name the device") from None
    found = [
        one.value
        for one in names.get_values_for_type(x509.OtherName)
        if one.type_id == _DEVICE_NAME
    ]
    text = found[0][2:].decode("ascii", "replace") if len(found) == 1 else ""
    parts = text.split(":")
    if (
        len(parts) != 3
        or parts[0] != "NVIDIA"
        or not all(one.replace("_", "").isalnum() for one in parts)
    ):
        raise ForgedEvidence("the device's certificate does not name a device of NVIDIA's")
    return text


def _check_firmware(report: Report, leaf: x509.Certificate) -> None:
    """The key belongs to the firmware that reports: the device derived it from that at boot."""
    said = report.opaque.get(FWID)
    if said is None:
        return
    for oid in _FIRMWARE_IDS:
        try:
            value = leaf.extensions.get_extension_for_oid(oid).value.public_bytes()
        except x509.ExtensionNotFound:
            continue
        if len(said) == SHA384.digest_size and _SHA384_DIGEST + said in value:
            return
    raise ForgedEvidence("the device's certificate is for other firmware than the report's")


def _fitting(
    report: Report, model: str, firmware: dict[str, str], trust: Trust
) -> dict[str, Reference]:
    """A reference for each firmware that has one; of several the one that fits best.

    Boards of one model share version numbers but not measurements, so a version may have several.
    """
    chosen = {}
    for name, version in firmware.items():
        same = [
            one
            for one in trust.references
            if _plain(one.model) == _plain(model) and one.version.upper() == version.upper()
        ]
        if same:
            best = min(same, key=lambda one: len(_mismatches(report, (one,))))
            best.check_dates(trust.now)
            chosen[name] = best
    return chosen


def _mismatches(report: Report, references: tuple[Reference, ...]) -> tuple[int, ...]:
    wrong: set[int] = set()
    seen: set[int] = set()
    for reference in references:
        for index, values in reference.measurements.items():
            if index == _NVDEC0_MEASUREMENT and report.opaque.get(NVDEC0) == _NVDEC0_OFF:
                continue
            # Two references for one measurement contradict each other, whatever they say.
            if index in seen or report.measurements.get(index) not in values:
                wrong.add(index)
            seen.add(index)
    return tuple(sorted(wrong))


def _protected_pcie(report: Report) -> bool:
    """The GPU shares its NVLinks with others in one box, in the clear: switches must be shown.

    NVIDIA's verifiers disagree on field 36 but for the value 2. Field 21 is 0x55 where the mode is
    off; another value counts as on.
    """
    feature = int.from_bytes(report.opaque.get(FEATURES, b""), "little")
    status = report.opaque.get(PROTECTED_PCIE, _PROTECTED_PCIE_OFF)
    return status != _PROTECTED_PCIE_OFF or feature == _PROTECTED_PCIE_FEATURE


def _switches(report: Report, *, reverse: bool) -> tuple[str, ...]:
    """The switch of each link of a GPU, which writes it from the other end; a switch's own."""
    raw = report.opaque.get(SWITCHES, b"")
    return tuple(sorted(one[::-1].hex() if reverse else one.hex() for one in _identities(raw)))


def _gpus_of_switch(report: Report) -> tuple[str, ...]:
    """The port map behind the identities is not read: GPUs are counted, ports are not."""
    raw = report.opaque.get(SWITCH_GPUS, b"")
    size = _SWITCH_GPUS * _IDENTITY_BYTES
    if raw and len(raw) < size:
        raise MalformedEvidence("the switch's list of GPUs is cut")
    return tuple(sorted(one.hex() for one in _identities(raw[:size])))


def _identities(raw: bytes) -> set[bytes]:
    """Each once, without the zeros of links that are off."""
    if len(raw) % _IDENTITY_BYTES:
        raise MalformedEvidence("the device's list of links is cut")
    each = {raw[at : at + _IDENTITY_BYTES] for at in range(0, len(raw), _IDENTITY_BYTES)}
    return {one for one in each if any(one)}


def _plain(model: str) -> str:
    """Certificates write LS_10 where references write LS10."""
    return model.replace("_", "")
