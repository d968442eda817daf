"""The tables of a policy that describe one kind of evidence each; kinds.py lists them.

Each table must state the rules without which something known gets in: an image of another firmware,
an older image of the same signer, a machine that its vendor no longer calls safe. A table that does
without one names it under `unchecked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sealring.attest.evidence.policy import KindRules
from sealring.attest.evidence.policy_ima import ImaRules, read_ima
from sealring.attest.evidence.policy_openings import Openings
from sealring.attest.evidence.policy_reader import Reader
from sealring.attest.evidence.snp import OTHER_BITS, PLATFORM_BITS, REGISTER_BYTES, TCB_BYTES
from sealring.attest.evidence.tpm.structures import BANKS
from sealring.attest.evidence.tpm.verify import RESETTABLE

_SNP: Final = {
    "measurements", "signers", "registers", "products", "minimum_tcb", "guest_svn",
    "platform_info", "vmpl", "migration", "vlek", "unchecked",
}  # fmt: skip
_MEASURED: Final = {"pcrs", "events", "ima"}
_TDX: Final = {"measurements", "registers", "minimum_tcb", "tcb_status", "unchecked"}
_SGX: Final = {*_TDX, "signers"}
_PCR_BYTES: Final = {str(pcr): tuple(BANKS.values()) for pcr in range(24) if pcr not in RESETTABLE}
_TDX_REGISTERS: Final = (
    *(f"rtmr{n}" for n in range(4)), "mrconfigid", "mrowner", "mrownerconfig",
)  # fmt: skip
STATUSES: Final = {
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded",
    "OutOfDate", "OutOfDateConfigurationNeeded",
}  # fmt: skip


def snp_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SNP)
    return _snp_rules(reader, table, where, Openings(reader, table, where))


def az_snp_vtpm_rules(reader: Reader, where: str) -> KindRules:
    """The launch measurement is the paravisor's; only PCRs tell what the guest itself booted."""
    table = reader.table(where, {*_SNP, *_MEASURED, "secure_boot"})
    openings = Openings(reader, table, where)
    pcrs, events = _measured(reader, table, where, openings, ("pcr4", "pcr7"))
    ima = read_ima(reader, table, where, openings)
    secure = reader.flag(table, where, "secure_boot", True)
    limits = {"insecure_boot": int(not secure)}
    return _snp_rules(reader, table, where, openings, pcrs, events, limits, ima)


def _snp_rules(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    openings: Openings,
    pcrs: Mapping[str, frozenset[str]] | None = None,
    events: Mapping[str, frozenset[str]] | None = None,
    limits: Mapping[str, int] | None = None,
    ima: ImaRules | None = None,
) -> KindRules:
    measurements = reader.digests(table, where, "measurements", 48)
    signers = reader.digests(table, where, "signers", 48)
    reader.some(measurements | signers, where, "measurements")
    products = reader.words(table, where, "products", TCB_BYTES)
    minimum = _snp_minimum(reader, table, where, products, openings)
    if signers:
        openings.need("guest_svn", "guest_svn" in table)
    platform, others = reader.flags(table, where, "platform_info", PLATFORM_BITS, OTHER_BITS)
    openings.need("platform_info", bool(platform))
    return KindRules(
        measurements=measurements,
        signers=signers,
        products=products or frozenset(minimum),
        minimum_tcb=minimum,
        launch_tcb=bool(minimum) and openings.checks("launch_tcb"),
        limits={
            "vmpl": reader.number(table, where, "vmpl", 0, 3, 0),
            "migration": reader.number(table, where, "migration", 0, 1, 0),
            "vlek": int(reader.flag(table, where, "vlek", False)),
            **(limits or {}),
        },
        masks={"platform_unknown": others} if platform else {},
        floors={"guest_svn": reader.number(table, where, "guest_svn", 0, 2**32 - 1, 0)}
        if "guest_svn" in table
        else {},
        facts={f"platform_{name}": value for name, value in platform.items()},
        registers={
            **reader.digest_lists(
                table, where, "registers", {name: (size,) for name, size in REGISTER_BYTES.items()}
            ),
            **(pcrs or {}),
        },
        events=events or {},
        ima=ima,
        unchecked=openings.close(),
    )


def _snp_minimum(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    products: frozenset[str],
    openings: Openings,
) -> dict[str, dict[str, int]]:
    """By product: AMD numbers each product's parts on its own, and Turin has one more."""
    found = table.get("minimum_tcb", {})
    if not isinstance(found, dict):
        raise reader.bad(where, "minimum_tcb", "is a table of products: {Milan = {snp = 8, ...}}")
    flat = any(type(value) is int for value in found.values())
    openings.need(
        "minimum_tcb",
        bool(found) and not flat,
        "one table for all products fits none, since AMD numbers each on its own" if flat else "",
    )
    if flat or not found:
        return {}
    inner = f"{where}.minimum_tcb"
    reader.known(found, TCB_BYTES, inner)
    minimum = {}
    for product in found:
        parts = TCB_BYTES[product]
        minimum[product] = reader.numbers(found, inner, product, parts, 255)
        if left_out := set(parts) - set(minimum[product]):
            raise reader.bad(
                inner, product, f"does not state {', '.join(sorted(left_out))}; 0 admits any"
            )
    if products and products != set(minimum):
        raise reader.bad(where, "products", "and minimum_tcb do not name the same products")
    return minimum


def tdx_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {*_TDX, "events"})
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 48)
    reader.some(measurements, where, "measurements")
    events = reader.digest_lists(table, where, "events", {f"rtmr{n}": (48,) for n in range(4)})
    registers = reader.digest_lists(table, where, "registers", dict.fromkeys(_TDX_REGISTERS, (48,)))
    for name in ("rtmr0", "rtmr1", "rtmr2"):
        openings.need(name, name in registers or name in events)
    return KindRules(
        measurements=measurements,
        registers=registers,
        events=events,
        minimum_tcb=_intel_minimum(reader, table, where, "module", "TDX"),
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def az_tdx_vtpm_rules(reader: Reader, where: str) -> KindRules:
    """MRTD is the paravisor's; only PCRs tell what the guest itself booted."""
    table = reader.table(where, {*_TDX, *_MEASURED, "secure_boot"})
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 48)
    reader.some(measurements, where, "measurements")
    pcrs, events = _measured(reader, table, where, openings, ("pcr4", "pcr7"))
    own = reader.digest_lists(table, where, "registers", dict.fromkeys(_TDX_REGISTERS, (48,)))
    secure = reader.flag(table, where, "secure_boot", True)
    return KindRules(
        measurements=measurements,
        registers={**own, **pcrs},
        events=events,
        ima=read_ima(reader, table, where, openings),
        limits={"insecure_boot": int(not secure)},
        minimum_tcb=_intel_minimum(reader, table, where, "module", "TDX"),
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def sgx_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SGX)
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 32)
    signers = reader.digests(table, where, "signers", 32)
    reader.some(measurements | signers, where, "measurements")
    registers = reader.digest_lists(table, where, "registers", {"isvprodid": (2,)})
    minimum = _intel_minimum(reader, table, where, "isvsvn", "SGX")
    if signers:
        stated = "isvsvn" in minimum.get("SGX", {})
        openings.need("isvsvn", stated)
        openings.need("isvprodid", "isvprodid" in registers)
    return KindRules(
        measurements=measurements,
        signers=signers,
        registers=registers,
        minimum_tcb=minimum,
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def _intel_minimum(
    reader: Reader, table: dict[str, Any], where: str, own: str, product: str
) -> dict[str, dict[str, int]]:
    found = reader.numbers(table, where, "minimum_tcb", {own, "evaluation"}, 65535)
    return {product: found} if found else {}


def _statuses(reader: Reader, table: dict[str, Any], where: str) -> frozenset[str]:
    statuses = reader.words(table, where, "tcb_status", STATUSES, ["UpToDate"])
    reader.some(statuses, where, "tcb_status")
    return statuses


def tpm_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {*_MEASURED, "roots", "ak_certificates", "unchecked"})
    openings = Openings(reader, table, where)
    registers, events = _measured(reader, table, where, openings, ("pcr0", "pcr4", "pcr7"))
    certified = reader.flag(table, where, "ak_certificates", False)
    return KindRules(
        registers=registers,
        events=events,
        ima=read_ima(reader, table, where, openings),
        limits={"ak_certificate": int(certified)},
        unchecked=openings.close(),
    )


def simulated_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {"measurements", "minimum_tcb", "roots"})
    measurements = reader.digests(table, where, "measurements")
    reader.some(measurements, where, "measurements")
    minimum = reader.numbers(table, where, "minimum_tcb", {"simulated"}, 255)
    return KindRules(
        measurements=measurements, minimum_tcb={"SIMULATED": minimum} if minimum else {}
    )


def _measured(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    openings: Openings,
    needed: tuple[str, ...],
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """PCRs by their values, by what they were extended with, or both."""
    pcrs, events = (
        {
            f"pcr{number}": values
            for number, values in reader.digest_lists(table, where, name, _PCR_BYTES).items()
        }
        for name in ("pcrs", "events")
    )
    reader.some({*pcrs, *events}, where, "pcrs")
    for name in needed:
        openings.need(name, name in pcrs or name in events)
    return pcrs, events
