"""NVIDIA's GPUs and NVSwitches: gets their signed reports and verifies them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence.chains import VerifiedChain, extension_of, verify_chain
from sealring.attest.evidence.encoding import (
    P384_ORDER,
    Cursor,
    check_ecdsa,
    check_spelling,
    not_bound,
    numbers_of,
    unknown_evidence,
    with_lower_s,
)
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.nvidia_reference import Reference
from sealring.attest.evidence.rules import (
    Finding,
    Rule,
    Rules,
    TableForm,
    Workers,
    any_of,
    at_least,
    distinct,
    flag,
    number,
    words,
)
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import AttestedDevice, DescribedWorker
from sealring.core.identity.loading import certificates_from_pem
from sealring.errors import (
    AttestationUnavailable,
    ForgedEvidence,
    MalformedEvidence,
)

SIGNATURE_BYTES: Final = 96
_VERSION: Final = 0x11
_REQUEST, _ANSWER = 0xE0, 0x60
_SIGNED, _ALL = 0x01, 0xFF
_DMTF: Final = 1

DRIVER, VBIOS, NVDEC0, CHIP_SKU, PROJECT, PROJECT_SKU = 3, 6, 11, 15, 17, 18
FWID, PROTECTED_PCIE, SWITCHES, SWITCH_GPUS, FEATURES = 20, 21, 22, 26, 36


@dataclass(frozen=True, slots=True)
class DeviceReport:
    nonce: bytes
    """The verifier's nonce, from the request."""
    measurements: Mapping[int, bytes]
    """The measurements by index, counted from 0 as in the references."""
    opaque: Mapping[int, bytes]
    signed: bytes
    signature: bytes

    def text(self, field: int) -> str:
        raw = self.opaque.get(field, b"").rstrip(b"\0")
        return raw.decode() if raw.isascii() and raw.decode("ascii").isprintable() else raw.hex()

    @property
    def vbios(self) -> str:
        """The version of the VBIOS. GPUs report bytes in an order of their own, switches text."""
        raw = self.opaque.get(VBIOS, b"")
        if len(raw) != 8:
            return self.text(VBIOS)
        return ".".join(f"{raw[at]:02X}" for at in (3, 2, 1, 0, 4))


def canonical_report(data: bytes) -> bytes:
    """The report as a worker sends it, without the zeros that some drivers leave after it."""
    _, end = _read(data)
    _check_rest(data, data[end:].rstrip(b"\0"))
    half = SIGNATURE_BYTES // 2
    return with_lower_s(data[:end], end - half, half, P384_ORDER)


def parse_report(data: bytes) -> DeviceReport:
    report, end = _read(data)
    _check_rest(data, data[end:])
    return report


def _check_rest(data: bytes, rest: bytes) -> None:
    if rest:
        raise MalformedEvidence(
            f"the device's report of {len(data)} bytes goes on behind its signature"
        )


def _read(data: bytes) -> tuple[DeviceReport, int]:
    """The report, and where it ends."""
    cursor = Cursor(data, "the device's report", "little")
    version, code, attributes, which = cursor.take(4)
    if version != _VERSION:
        raise unknown_evidence(f"SPDM version {version:#x} is not known")
    if (code, attributes, which) != (_REQUEST, _SIGNED, _ALL):
        raise MalformedEvidence("the report is no answer to a request for all measurements")
    nonce = cursor.take(32)
    cursor.take(1)
    version, code = cursor.number(1), cursor.number(1)
    if (version, code) != (_VERSION, _ANSWER):
        raise MalformedEvidence("the report does not hold SPDM measurements")
    cursor.take(2)
    blocks = cursor.number(1)
    measurements = _measurements(cursor.sized(3), blocks)
    cursor.take(32)  # the device's own nonce, which keeps it from signing bytes that others chose
    opaque = _opaque(cursor.sized(2))
    signed = data[: cursor.at]
    signature = cursor.take(SIGNATURE_BYTES)
    return DeviceReport(nonce, measurements, opaque, signed, signature), cursor.at


def _measurements(record: bytes, blocks: int) -> dict[int, bytes]:
    cursor = Cursor(record, "the measurements", "little")
    found: dict[int, bytes] = {}
    for _ in range(blocks):
        index, form = cursor.number(1), cursor.number(1)
        if form != _DMTF:
            raise unknown_evidence(f"measurements of form {form} are not known")
        if index == 0 or index - 1 in found:
            raise MalformedEvidence(f"measurement {index} has no place, or comes twice")
        block = Cursor(cursor.sized(2), "a measurement", "little")
        block.take(1)
        found[index - 1] = block.sized(2)
        block.end()
    cursor.end()
    if not found:
        raise MalformedEvidence("the report holds no measurements")
    return found


def _opaque(data: bytes) -> dict[int, bytes]:
    cursor = Cursor(data, "the device's own fields", "little")
    found: dict[int, bytes] = {}
    while cursor.left:
        field = cursor.number(2)
        if field in found:
            raise MalformedEvidence(f"the device's field {field} comes twice")
        found[field] = cursor.sized(2)
    return found


KIND: Final = "nvidia"
GPUS: Final = frozenset({"GH100", "GB100", "GB102", "GB202", "GB203", "GB205", "GB206", "GB207"})
NVSWITCHES: Final = frozenset({"LS_10"})
_DEVICE_NAME: Final = x509.ObjectIdentifier("1.3.6.1.4.1.412.274.1")
_FIRMWARE_IDS: Final = tuple(
    x509.ObjectIdentifier(oid) for oid in ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
)
# How a DICE certificate writes a firmware's hash: a SEQUENCE of SHA-384's OID and 48 bytes.
_SHA384_DIGEST: Final = bytes.fromhex("303d06096086480165030402020430")
_NVDEC0_OFF: Final = b"\x55"
_NVDEC0_MEASUREMENT: Final = 35
_IDENTITY_BYTES: Final = 8
# A switch lists this many GPUs (zeros: none). A map follows, from each port to a GPU of the list.
_SWITCH_GPUS: Final = 8
_PROTECTED_PCIE_OFF: Final = b"\x55"
_PROTECTED_PCIE_FEATURE: Final = 2


def verify_nvidia(evidence: DeviceEvidence, nonce: bytes | None, trust: Trust) -> AttestedDevice:
    (raw,) = evidence.only("report")
    check_spelling(raw, canonical_report(raw), "the device's report")
    report, chain, model = verify_report(raw, evidence.chain, trust)
    if nonce is not None and report.nonce != nonce:
        raise not_bound("the device's report was made for another machine, worker or time")
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
) -> tuple[DeviceReport, VerifiedChain, str]:
    """Verifies that a device of NVIDIA's signed these bytes, and returns its model too.

    The caller checks the nonce.
    """
    report = parse_report(raw)
    verified = verify_chain(chain, trust.nvidia, trust)
    numbers = numbers_of(report.signature)
    check_ecdsa(verified.leaf.public_key(), numbers, report.signed, "the device's report")
    _check_firmware(report, verified.leaf)
    model = _name(verified.leaf).split(":")[1]
    if model not in GPUS | NVSWITCHES:
        raise unknown_evidence(f"NVIDIA devices of model {model} are not known")
    return report, verified, model


def _name(leaf: x509.Certificate) -> str:
    """The device's SPDM name, for example NVIDIA:GH100:48B02D92494BADF4."""
    names = extension_of(leaf, x509.SubjectAlternativeName)
    if names is None:
        raise ForgedEvidence("the device's certificate does not name the device")
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


def _check_firmware(report: DeviceReport, leaf: x509.Certificate) -> None:
    """Requires that the key belongs to the reported firmware, from which the device derived it."""
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
    report: DeviceReport, model: str, firmware: dict[str, str], trust: Trust
) -> dict[str, Reference]:
    """A reference for each firmware that has one. If there are several, the one that fits best.

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


def _mismatches(report: DeviceReport, references: tuple[Reference, ...]) -> tuple[int, ...]:
    wrong: set[int] = set()
    seen: set[int] = set()
    for reference in references:
        for index, values in reference.measurements.items():
            if index == _NVDEC0_MEASUREMENT and report.opaque.get(NVDEC0) == _NVDEC0_OFF:
                continue
            # Two references for one measurement may contradict each other, so it counts as wrong.
            if index in seen or report.measurements.get(index) not in values:
                wrong.add(index)
            seen.add(index)
    return tuple(sorted(wrong))


def _protected_pcie(report: DeviceReport) -> bool:
    """Whether the GPU shares its NVLinks with others in one box, unencrypted.

    Its switches must then be shown. NVIDIA's verifiers agree on field 36 only for the value 2.
    Field 21 is 0x55 if the mode is off; any other value counts as on.
    """
    feature = int.from_bytes(report.opaque.get(FEATURES, b""), "little")
    status = report.opaque.get(PROTECTED_PCIE, _PROTECTED_PCIE_OFF)
    return status != _PROTECTED_PCIE_OFF or feature == _PROTECTED_PCIE_FEATURE


def _switches(report: DeviceReport, *, reverse: bool) -> tuple[str, ...]:
    """The switches that a GPU's links lead to, or a switch's own identity.

    A GPU writes the bytes of an identity in reverse order.
    """
    raw = report.opaque.get(SWITCHES, b"")
    return tuple(sorted(one[::-1].hex() if reverse else one.hex() for one in _identities(raw)))


def _gpus_of_switch(report: DeviceReport) -> tuple[str, ...]:
    """The GPUs that the switch lists. The port map after the list is not read."""
    raw = report.opaque.get(SWITCH_GPUS, b"")
    size = _SWITCH_GPUS * _IDENTITY_BYTES
    if raw and len(raw) < size:
        raise MalformedEvidence("the switch's list of GPUs is cut")
    return tuple(sorted(one.hex() for one in _identities(raw[:size])))


def _identities(raw: bytes) -> set[bytes]:
    """Each identity once, without the zeros of links that are off."""
    if len(raw) % _IDENTITY_BYTES:
        raise MalformedEvidence("the device's list of links is cut")
    each = {raw[at : at + _IDENTITY_BYTES] for at in range(0, len(raw), _IDENTITY_BYTES)}
    return {one for one in each if any(one)}


def _plain(model: str) -> str:
    """The model without underscores: certificates write LS_10 where references write LS10."""
    return model.replace("_", "")


LIBRARY: Final = "libnvidia-ml.so.1"
NONCE_BYTES: Final = 32


class GpuCertificate(ctypes.Structure):
    _fields_ = (
        ("chain_size", ctypes.c_uint),
        ("attestation_chain_size", ctypes.c_uint),
        ("chain", ctypes.c_ubyte * 0x1000),
        ("attestation_chain", ctypes.c_ubyte * 0x1400),
    )


class GpuReport(ctypes.Structure):
    _fields_ = (
        ("has_second_report", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("second_size", ctypes.c_uint),
        ("nonce", ctypes.c_ubyte * NONCE_BYTES),
        ("report", ctypes.c_ubyte * 0x2000),
        ("second_report", ctypes.c_ubyte * 0x1000),
    )


def collect_gpus(nonce: bytes, library: Any = None) -> tuple[DeviceEvidence, ...]:
    """The evidence of every GPU that NVML shows. `nonce` is `Challenge.device_nonce`."""
    nvml = library or _load()
    _check("nvmlInit_v2", nvml.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check("nvmlDeviceGetCount_v2", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return tuple(_one(nvml, index, nonce) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, index: int, nonce: bytes) -> DeviceEvidence:
    device = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    _check("nvmlDeviceGetHandleByIndex_v2", found)
    certificate, report = GpuCertificate(), GpuReport()
    name = "nvmlDeviceGetConfComputeGpuCertificate"
    _check(name, getattr(nvml, name)(device, ctypes.byref(certificate)))
    ctypes.memmove(report.nonce, nonce, NONCE_BYTES)
    name = "nvmlDeviceGetConfComputeGpuAttestationReport"
    _check(name, getattr(nvml, name)(device, ctypes.byref(report)))
    pem = bytes(certificate.attestation_chain)[: certificate.attestation_chain_size]
    chain = certificates_from_pem(pem, AttestationUnavailable(f"GPU {index} gives no certificates"))
    return DeviceEvidence(
        KIND,
        {"report": canonical_report(bytes(report.report)[: report.size])},
        tuple(one.public_bytes(Encoding.DER) for one in chain),
    )


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise AttestationUnavailable(
            f"{LIBRARY} is not here: install NVIDIA's driver, or show no GPUs"
        ) from None


def _check(name: str, outcome: int) -> None:
    if outcome:
        raise AttestationUnavailable(
            f"{name} answers with error {outcome}: is the GPU in confidential-computing mode?"
        )


class _Count(Rule):
    """The least number of GPUs, or of switches, that a machine must show."""

    refusal = "policy.device_not_allowed"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        yield at_least(self.name, len(self._shown(worker)), rules[self.name])
        if self.name == "switches":
            yield from _linked(worker)

    def write(self, workers: Workers) -> Any:
        return min(len(self._shown(worker)) for worker in workers)

    def _shown(self, worker: DescribedWorker) -> set[str]:
        switches = self.name == "switches"
        return {one.identity for one in worker.devices if one.is_switch == switches}


def _linked(worker: DescribedWorker) -> Iterable[Finding]:
    """Checks the links from both ends, if switches are shown.

    The links must connect exactly the shown GPUs and switches. GPUs in protected PCIe mode share
    NVLinks that are not encrypted, so their switches must be shown, whatever the policy's count of
    switches is.
    """
    switches = [one for one in worker.devices if one.is_switch]
    gpus = [one for one in worker.devices if not one.is_switch]
    if not switches:
        if alone := " ".join(sorted(one.identity for one in gpus if one.protected_pcie)):
            wanted = "shown with every GPU in protected PCIe mode"
            yield "switches of gpus", False, wanted, f"none, for {alone}"
        return
    shown = {one for device in switches for one in device.switches}
    wrong = " ".join(sorted(one.identity for one in gpus if set(one.switches) != shown))
    found = f"not so: {wrong}" if wrong else "so"
    yield "links of gpus", not wrong, "each to all switches shown and no other", found
    count = len({one.identity for one in gpus})
    ends = {frozenset(device.gpus) for device in switches}
    counts = ", ".join(sorted(str(len(one)) for one in ends))
    passed = len(ends) == 1 and {len(one) for one in ends} == {count}
    found = f"{counts} GPUs, {len(ends)} sets of them"
    yield "links of switches", passed, f"all to the same {count} GPUs", found


@dataclass(frozen=True, slots=True)
class _OfEach(Rule):
    """The allowed words for one property of each device. An empty list allows all."""

    about: str = "model"
    refusal: ClassVar[str] = "policy.device_not_allowed"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        for device in worker.devices:
            has = self._of(device)
            if rules[self.name] and has is not None:
                listed = rules[self.name]
                yield f"{device.identity} {self.about}", has in listed, any_of(listed), has

    def write(self, workers: Workers) -> Any:
        found = [self._of(device) for worker in workers for device in worker.devices]
        known = [one for one in found if one is not None]
        return distinct(known) if all(known) else None

    def _of(self, device: AttestedDevice) -> str | None:
        return device.model if self.about == "model" else device.firmware.get(self.about)


class _References(Rule):
    refusal = "policy.measurement_not_allowed"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        needed = rules[self.name]
        wanted = "as NVIDIA's references" if needed else "as any reference there is"
        for device in worker.devices:
            said = [f"{' '.join(map(str, device.mismatches))} differ"] if device.mismatches else []
            said += [f"no reference for the {part}" for part in device.unreferenced]
            fits = not device.mismatches and not (device.unreferenced and needed)
            yield f"{device.identity} measurements", fits, wanted, "; ".join(said) or "the same"

    def weak(self, rules: Rules) -> Iterable[str]:
        if not rules[self.name]:
            yield f"{self.name}: firmware passes for which no reference is at hand."


NVIDIA_FORM: Final = TableForm(
    rules=(
        _Count("gpus", number(0, 16, 1), "At least so many GPUs."),
        _Count("switches", number(0, 16, 0)),
        _OfEach("models", words(GPUS | NVSWITCHES)),
        _OfEach("drivers", words(), about="driver"),
        _OfEach("vbios", words(), about="vbios"),
        _References("require_reference", flag(True)),
    )
)
