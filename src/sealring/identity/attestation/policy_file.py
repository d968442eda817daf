"""The policy as TOML: which tables there are, what each may hold. What is not known is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sealring.identity.attestation.intel import SGX, TDX
from sealring.identity.attestation.nvidia.device import GPUS, NVSWITCHES
from sealring.identity.attestation.policy import DeviceRules, KindRules, Policy, RankRules
from sealring.identity.attestation.policy_broker import (
    BROKER_FIELDS,
    read_job,
    read_peer_evidence,
    read_resources,
)
from sealring.identity.attestation.policy_reader import Reader
from sealring.identity.attestation.tpm.verify import RESETTABLE
from sealring.limits import MAX_NONCE_SECONDS

_FRESHNESS: Final = {"nonce_seconds", "require_revocation_lists", "revocation_list_days"}
_SNP: Final = {"measurements", "signers", "products", "minimum_tcb", "vmpl", "migration"}
_VTPM: Final = {*_SNP, "pcrs", "events", "secure_boot"}
_TDX: Final = {"measurements", "registers", "minimum_tcb", "tcb_status"}
_SGX: Final = {"measurements", "signers", "registers", "minimum_tcb", "tcb_status"}
_TPM: Final = {"roots", "pcrs", "events"}
_SIMULATED: Final = {"measurements", "minimum_tcb", "roots"}
_NVIDIA: Final = {"gpus", "switches", "models", "drivers", "vbios", "require_reference"}
_PRODUCTS: Final = {"Milan", "Genoa", "Turin"}
_SNP_TCB: Final = {"fmc", "bootloader", "tee", "snp", "microcode"}
_PCRS: Final = {str(pcr) for pcr in range(24) if pcr not in RESETTABLE}
_TDX_REGISTERS: Final = {
    *(f"rtmr{n}" for n in range(4)), "mrconfigid", "mrowner", "mrownerconfig",
}  # fmt: skip
_STATUSES: Final = {
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded",
    "OutOfDate", "OutOfDateConfigurationNeeded",
}  # fmt: skip


def parse_policy(text: str) -> Policy:
    reader = Reader(text)
    document = reader.document
    known = {"version", "freshness", "rejoins", "ranks", "nvidia", *BROKER_FIELDS, *_KINDS}
    reader.known(document, known, "")
    if document.get("version") != 1 or type(document["version"]) is not int:
        raise reader.bad("", "version", "is 1")
    kinds = {name: rules(reader, name) for name, rules in _KINDS.items() if name in document}
    if not kinds:
        raise reader.bad(
            "", "snp", "or another kind of evidence is missing: the policy admits nothing"
        )
    fresh = reader.table("freshness", _FRESHNESS)
    return Policy(
        kinds=kinds,
        ranks=_ranks(reader, set(kinds)),
        simulated_roots=_roots(reader, "simulated", _SIMULATED),
        tpm_roots=_roots(reader, "tpm", _TPM),
        devices=_devices(reader) if "nvidia" in document else None,
        nonce_seconds=reader.number(fresh, "freshness", "nonce_seconds", 1, MAX_NONCE_SECONDS, 120),
        require_revocation_lists=reader.flag(fresh, "freshness", "require_revocation_lists", True),
        revocation_list_days=reader.number(fresh, "freshness", "revocation_list_days", 1, 3650, 30),
        rejoins=reader.number(document, "", "rejoins", 0, 1000, 0),
        job=read_job(reader),
        certificate_minutes=reader.number(
            reader.table("certificate", {"minutes"}), "certificate", "minutes", 1, 1440, 10
        ),
        peer_evidence=read_peer_evidence(reader, set(kinds)),
        resources=read_resources(reader, set(kinds)),
    )


def _snp(reader: Reader, where: str) -> KindRules:
    return _snp_rules(reader, reader.table(where, _SNP), where, {}, {}, {})


def _az_snp_vtpm(reader: Reader, where: str) -> KindRules:
    """The launch measurement is the paravisor's; only PCRs tell what the guest itself booted."""
    table = reader.table(where, _VTPM)
    registers, events = _measured(reader, table, where)
    secure = reader.flag(table, where, "secure_boot", True)
    limits = {"insecure_boot": int(not secure)}
    return _snp_rules(reader, table, where, registers, events, limits)


def _snp_rules(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    registers: Mapping[str, frozenset[str]],
    events: Mapping[str, frozenset[str]],
    limits: Mapping[str, int],
) -> KindRules:
    measurements = reader.digests(table, where, "measurements", 48)
    signers = reader.digests(table, where, "signers", 48)
    reader.some(measurements | signers, where, "measurements")
    return KindRules(
        measurements=measurements,
        signers=signers,
        products=reader.words(table, where, "products", _PRODUCTS),
        minimum_tcb=reader.numbers(table, where, "minimum_tcb", _SNP_TCB, 255),
        limits={
            "vmpl": reader.number(table, where, "vmpl", 0, 3, 0),
            "migration": reader.number(table, where, "migration", 0, 1, 0),
            **limits,
        },
        registers=registers,
        events=events,
    )


def _tdx(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _TDX)
    measurements = reader.digests(table, where, "measurements", 48)
    reader.some(measurements, where, "measurements")
    return KindRules(
        measurements=measurements,
        registers=reader.digest_lists(table, where, "registers", _TDX_REGISTERS, 48),
        minimum_tcb=reader.numbers(table, where, "minimum_tcb", {"module", "evaluation"}, 65535),
        tcb_status=_statuses(reader, table, where),
    )


def _sgx(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SGX)
    measurements = reader.digests(table, where, "measurements", 32)
    signers = reader.digests(table, where, "signers", 32)
    reader.some(measurements | signers, where, "measurements")
    return KindRules(
        measurements=measurements,
        signers=signers,
        registers=reader.digest_lists(table, where, "registers", {"isvprodid"}, 2),
        minimum_tcb=reader.numbers(table, where, "minimum_tcb", {"isvsvn", "evaluation"}, 65535),
        tcb_status=_statuses(reader, table, where),
    )


def _statuses(reader: Reader, table: dict[str, Any], where: str) -> frozenset[str]:
    statuses = reader.words(table, where, "tcb_status", _STATUSES, ["UpToDate"])
    reader.some(statuses, where, "tcb_status")
    return statuses


def _tpm(reader: Reader, where: str) -> KindRules:
    registers, events = _measured(reader, reader.table(where, _TPM), where)
    return KindRules(registers=registers, events=events)


def _simulated(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SIMULATED)
    measurements = reader.digests(table, where, "measurements", None)
    reader.some(measurements, where, "measurements")
    minimum = reader.numbers(table, where, "minimum_tcb", {"simulated"}, 255)
    return KindRules(measurements=measurements, minimum_tcb=minimum)


_KINDS: Final[Mapping[str, Callable[[Reader, str], KindRules]]] = {
    "snp": _snp,
    "az-snp-vtpm": _az_snp_vtpm,
    TDX: _tdx,
    SGX: _sgx,
    "tpm": _tpm,
    "simulated": _simulated,
}


def _measured(
    reader: Reader, table: dict[str, Any], where: str
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """PCRs by their values, by what they were extended with, or both."""
    pcrs, events = (
        reader.digest_lists(table, where, name, _PCRS, 32) for name in ("pcrs", "events")
    )
    reader.some({*pcrs, *events}, where, "pcrs")
    return (
        {f"pcr{number}": values for number, values in pcrs.items()},
        {f"pcr{number}": values for number, values in events.items()},
    )


def _roots(reader: Reader, where: str, known: set[str]) -> frozenset[str]:
    if where not in reader.document:
        return frozenset()
    roots = reader.digests(reader.table(where, known), where, "roots", 32)
    reader.some(roots, where, "roots")
    return roots


def _devices(reader: Reader) -> DeviceRules:
    table = reader.table("nvidia", _NVIDIA)
    versions = {
        "driver": reader.words(table, "nvidia", "drivers", None),
        "vbios": reader.words(table, "nvidia", "vbios", None),
    }
    return DeviceRules(
        gpus=reader.number(table, "nvidia", "gpus", 0, 16, 1),
        switches=reader.number(table, "nvidia", "switches", 0, 16, 0),
        models=reader.words(table, "nvidia", "models", GPUS | NVSWITCHES),
        firmware={name: listed for name, listed in versions.items() if listed},
        require_reference=reader.flag(table, "nvidia", "require_reference", True),
    )


def _ranks(reader: Reader, kinds: set[str]) -> tuple[RankRules, ...]:
    rules = []
    for entry in reader.tables("ranks"):
        reader.known(entry, {"ranks", "kinds"}, "ranks")
        first, last = reader.ranks(entry, "ranks")
        rules.append(RankRules(first, last, reader.kinds(entry, "ranks", kinds)))
    return tuple(rules)
