"""AMD SEV-SNP: reads a report's bytes and verifies them.

The layout follows AMD's SEV-SNP firmware ABI (document 56860). Bytes that the signature does not
cover must be zero, and the signature has one accepted spelling, so each report has one spelling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from sealring.attest.evidence.chains import VerifiedChain, verify_chain
from sealring.attest.evidence.encoding import (
    P384_ORDER,
    at,
    check_ecdsa,
    check_spelling,
    read_structure,
    unknown_evidence,
    with_lower_s,
)
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.rules import (
    Finding,
    MinimumTcb,
    Need,
    Prompter,
    Registers,
    Rule,
    Rules,
    Table,
    TableForm,
    Workers,
    at_least,
    digest_lists,
    digests,
    flag,
    limit,
    measurements,
    number,
    numbers,
    refused_unless,
    shown,
)
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import Claims, DescribedWorker
from sealring.errors import (
    ConfigurationError,
    ForgedEvidence,
    MalformedEvidence,
)

KIND: Final = "snp"
REPORT_BYTES: Final = 1184
SIGNED_BYTES: Final = 0x2A0
_VERSIONS: Final = (2, 3, 5)
_ECDSA_P384_SHA384: Final = 1
SCALAR_BYTES: Final = 72
_END: Final = SIGNED_BYTES + 2 * SCALAR_BYTES
_VCEK, _VLEK = 0, 1
_AMD: Final = "1.3.6.1.4.1.3704.1."
_PRODUCT, _CHIP = _AMD + "2", _AMD + "4"

# The place of each part's version in the eight bytes of a TCB; below, its certificate extension.
TCB_BYTES: Final = {
    "Milan": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
}
_TCB_OIDS: Final = {
    "bootloader": _AMD + "3.1",
    "tee": _AMD + "3.2",
    "snp": _AMD + "3.3",
    "microcode": _AMD + "3.8",
    "fmc": _AMD + "3.9",
}
# The bits of PLATFORM_INFO that AMD has named. All others count as `platform_unknown`: for example,
# real Turin machines set bit 6.
PLATFORM_BITS: Final = {
    "smt": 0,
    "tsme": 1,
    "ecc": 2,
    "rapl_disabled": 3,
    "ciphertext_hiding": 4,
    "alias_check": 5,
    "tio": 7,
}
OTHER_BITS: Final = "other_bits"
"""A key of a policy's `platform_info`: the positions of unnamed bits that may be set."""
_BITS: Final = 64
REGISTER_BYTES: Final = {"host_data": 32, "family_id": 16, "image_id": 16, "author_key": 48}


@dataclass(frozen=True, slots=True)
class Report:
    """The fields of a report. Reading them does not verify them."""

    version: int = at(0x00, 4)
    guest_svn: int = at(0x04, 4)
    policy: int = at(0x08, 8)
    family_id: bytes = at(0x10, 16)
    image_id: bytes = at(0x20, 16)
    vmpl: int = at(0x30, 4)
    sig_algo: int = at(0x34, 4)
    plat_info: int = at(0x40, 8)
    key_info: int = at(0x48, 4)
    report_data: bytes = at(0x50, 64)
    measurement: bytes = at(0x90, 48)
    host_data: bytes = at(0xC0, 32)
    id_key_digest: bytes = at(0xE0, 48)
    author_key_digest: bytes = at(0x110, 48)
    tcb: bytes = at(0x180, 8)
    chip_id: bytes = at(0x1A0, 64)
    launch_tcb: bytes = at(0x1F0, 8)
    signed: bytes = at(0, SIGNED_BYTES)
    r: int = at(SIGNED_BYTES, SCALAR_BYTES)
    s: int = at(SIGNED_BYTES + SCALAR_BYTES, SCALAR_BYTES)
    after_signature: bytes = at(_END, REPORT_BYTES - _END, zero=True)

    @property
    def debug(self) -> bool:
        return bool(self.policy >> 19 & 1)

    @property
    def signing_key(self) -> int:
        return self.key_info >> 2 & 7

    @property
    def key_name(self) -> str:
        """The common name of the signing key's certificate."""
        return {_VCEK: "SEV-VCEK", _VLEK: "SEV-VLEK"}.get(self.signing_key, "an unknown key")


def parse_report(data: bytes) -> Report:
    if len(data) != REPORT_BYTES:
        raise MalformedEvidence(f"an SNP report has {REPORT_BYTES} bytes, and this has {len(data)}")
    report = read_structure(Report, data, "the SNP report")
    if report.version not in _VERSIONS:
        raise unknown_evidence(f"SNP reports of version {report.version} are not known")
    if report.sig_algo != _ECDSA_P384_SHA384:
        raise unknown_evidence(f"SNP signature algorithm {report.sig_algo} is not known")
    return report


def canonical_report(raw: bytes) -> bytes:
    """The report as a worker sends it, with the signature in its one spelling."""
    return with_lower_s(raw, SIGNED_BYTES + SCALAR_BYTES, SCALAR_BYTES, P384_ORDER, "little")


def verify_snp(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    (raw,) = evidence.only("report")
    check_spelling(raw, canonical_report(raw), "the SNP report")
    report, chain, product = verify_report(raw, evidence.chain, trust)
    evidence.check_bound(report.report_data, challenge, "the SNP report")
    return claims_of(report, chain, product)


def claims_of(report: Report, chain: VerifiedChain, product: str) -> Claims:
    return Claims(
        product=product,
        machine=report.chip_id.hex() if any(report.chip_id) else "",
        measurement=report.measurement.hex(),
        signer=report.id_key_digest.hex() if any(report.id_key_digest) else "",
        registers={
            "host_data": report.host_data.hex(),
            "family_id": report.family_id.hex(),
            "image_id": report.image_id.hex(),
            "author_key": report.author_key_digest.hex(),
        },
        tcb=_tcb(report.tcb, product),
        launch_tcb=_tcb(report.launch_tcb, product),
        debug=report.debug,
        guest={
            "vmpl": report.vmpl,
            "migration": report.policy >> 18 & 1,
            "smt": report.policy >> 16 & 1,
            "vlek": int(report.signing_key == _VLEK),
            "guest_svn": report.guest_svn,
            **_platform(report.plat_info),
        },
        **chain.standing,
    )


def verify_report(
    raw: bytes, chain: tuple[bytes, ...], trust: Trust
) -> tuple[Report, VerifiedChain, str]:
    """Verifies that AMD's hardware signed these bytes, and returns the product line too.

    The caller checks the report data.
    """
    report = parse_report(raw)
    verified = verify_chain(chain, trust.amd, trust)
    product = trust.amd[verified.root]
    _check_role(report, verified, product)
    check_report_signature(report, verified.leaf)
    reported, certified = _tcb(report.tcb, product), _tcb_of_key(verified.leaf, product)
    if reported != certified:
        raise ForgedEvidence(f"the key is for the TCB {certified}, and the report says {reported}")
    if report.signing_key == _VCEK:
        _check_chip(report, verified.leaf)
    return report, verified, product


def _check_role(report: Report, chain: VerifiedChain, product: str) -> None:
    """Requires that the leaf is the kind of key that the report names, from its authority."""
    names = {_VCEK: ("SEV-VCEK", f"SEV-{product}"), _VLEK: ("SEV-VLEK", f"SEV-VLEK-{product}")}
    if report.signing_key not in names:
        raise unknown_evidence(f"SNP signing key {report.signing_key} is not known")
    found = tuple(common_name(one) for one in chain.certificates[:-1])
    if found != names[report.signing_key]:
        raise ForgedEvidence(
            f"the report names a key of {' by '.join(names[report.signing_key])}, and its chain is "
            f"{' by '.join(found)}"
        )
    if report.signing_key == _VCEK:
        stated = _extension(chain.leaf, _PRODUCT)[2:].decode("ascii", "replace")
        if stated.partition("-")[0] != product:
            raise ForgedEvidence(f"the key is for {stated}, and its root is {product}'s")


def check_report_signature(report: Report, leaf: x509.Certificate) -> None:
    check_ecdsa(leaf.public_key(), (report.r, report.s), report.signed, "the SNP report")


def _check_chip(report: Report, leaf: x509.Certificate) -> None:
    # Turin's certificates hold the first eight bytes of the identifier, whose rest is zero.
    chip = _extension(leaf, _CHIP)
    if not any(chip) or report.chip_id != chip.ljust(len(report.chip_id), b"\0"):
        raise ForgedEvidence("the certificate is for another chip than the report's")


def _tcb(raw: bytes, product: str) -> dict[str, int]:
    return {name: raw[at] for name, at in TCB_BYTES[product].items()}


def _platform(info: int) -> dict[str, int]:
    facts = {f"platform_{name}": info >> bit & 1 for name, bit in PLATFORM_BITS.items()}
    known = sum(1 << bit for bit in PLATFORM_BITS.values())
    return facts | {"platform_unknown": info & ~known}


def _tcb_of_key(leaf: x509.Certificate, product: str) -> dict[str, int]:
    return {name: _integer(_extension(leaf, _TCB_OIDS[name])) for name in TCB_BYTES[product]}


def _extension(certificate: x509.Certificate, oid: str) -> bytes:
    try:
        found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid))
    except (x509.ExtensionNotFound, ValueError):
        raise ForgedEvidence(f"the SNP key's certificate lacks {oid}") from None
    return found.value.public_bytes()


def _integer(der: bytes) -> int:
    if not (3 <= len(der) <= 4 and der[0] == 2 and der[1] == len(der) - 2):
        raise ForgedEvidence("a version in the SNP key's certificate is not a small number")
    return int.from_bytes(der[2:], "big")


def common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


class _MinimumTcb(MinimumTcb):
    def write(self, workers: Workers) -> Any:
        """The oldest version of each part that any of the workers has, by product."""
        least: dict[str, dict[str, int]] = {}
        for one in workers:
            have = least.setdefault(one.product, dict(one.tcb))
            for name, value in (*one.tcb.items(), *one.launch_tcb.items()):
                have[name] = min(have[name], value)
        return least

    def ask(self, prompter: Prompter) -> Any:
        minimum = {}
        for product, parts in TCB_BYTES.items():
            asked = f"{product}: least versions of {' '.join(parts)}"
            if versions := prompter.values(asked, "not admitted"):
                if len(versions) != len(parts) or not all(one.isdigit() for one in versions):
                    raise ConfigurationError(f"{product} takes {len(parts)} numbers")
                minimum[product] = dict(zip(parts, map(int, versions), strict=True))
        return minimum


def _read_minimum(table: Table, name: str) -> dict[str, dict[str, int]]:
    """Reads the minimum by product. AMD numbers each product's parts apart; Turin has one more."""
    found = table.inner(name, "a table of products", TCB_BYTES)
    minimum = {one: numbers(TCB_BYTES[one], 255)(found, one) for one in found.values}
    for product, parts in minimum.items():
        if left_out := ", ".join(sorted(set(TCB_BYTES[product]) - set(parts))):
            raise found.bad(product, f"does not state {left_out}; 0 admits any")
    return minimum


class _GuestSvn(Rule):
    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        if rules[self.name] is not None:
            yield at_least(self.name, worker.guest.get(self.name), rules[self.name])

    def weak(self, rules: Rules) -> Iterable[str]:
        if rules["signers"] and rules[self.name] == 0:
            yield f"{self.name}: {rules.form.passes(self.name)}, since 0 is any."


class _Platform(Rule):
    """Named bits of PLATFORM_INFO, and the unnamed bits that may be set."""

    def stated(self, value: Mapping[str, Any]) -> Collection[str]:
        return [self.name] if set(value) - {OTHER_BITS} else []

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        if not self.stated(rules[self.name]):
            return
        has, others = worker.guest.get("platform_unknown"), _others(rules)
        fits = has is not None and not has & ~others
        found = shown(has) if has is None else _bits(has)
        yield "platform_unknown", fits, f"at most {_bits(others)}", found
        for name, value in rules[self.name].items():
            if name != OTHER_BITS:
                has = worker.guest.get(f"platform_{name}")
                yield f"platform_{name}", has == value, str(int(value)), shown(has)

    def weak(self, rules: Rules) -> Iterable[str]:
        if self.stated(rules[self.name]) and (others := _others(rules)):
            unknown = f"{_bits(others)}, whose meaning is not known"
            yield f"{self.name}: hosts pass that report {unknown}."

    def write(self, workers: Workers) -> Any:
        """The named bits that all workers report alike, and the unnamed ones that any reports."""
        first, *others = (one.guest for one in workers)
        named: dict[str, Any] = {
            name: bool(first[f"platform_{name}"])
            for name in PLATFORM_BITS
            if all(one[f"platform_{name}"] == first[f"platform_{name}"] for one in others)
        }
        unnamed = reduce(or_, (one.guest["platform_unknown"] for one in workers))
        return named | ({OTHER_BITS: _positions(unnamed)} if named and unnamed else {})

    def ask(self, prompter: Prompter) -> Any:
        known = ("on", "off", "any")
        found = {name: prompter.choice(f"Platform's {name}", known) for name in PLATFORM_BITS}
        return {name: answer == "on" for name, answer in found.items() if answer != "any"}


def _read_platform(table: Table, name: str) -> dict[str, Any]:
    found = table.inner(name, "a table of true and false", {*PLATFORM_BITS, OTHER_BITS})
    positions = found.values.get(OTHER_BITS, [])
    if not isinstance(positions, list) or not all(
        type(one) is int and 0 <= one < _BITS for one in positions
    ):
        raise found.bad(OTHER_BITS, f"is a list of positions of bits, 0 to {_BITS - 1}")
    return {
        key: positions if key == OTHER_BITS else flag(False)(found, key) for key in found.values
    }


def _others(rules: Rules) -> int:
    """The mask of the unnamed bits that may be set."""
    return sum(1 << one for one in set(rules["platform_info"].get(OTHER_BITS, ())))


def _positions(value: int) -> list[int]:
    return [at for at in range(value.bit_length()) if value >> at & 1]


def _bits(value: int) -> str:
    """For example "bits 6 9", or "no bits"."""
    return f"bits {' '.join(map(str, _positions(value)))}" if value else "no bits"


_REGISTERS: Final = Registers(
    "registers",
    digest_lists({name: (size,) for name, size in REGISTER_BYTES.items()}),
    "What was measured or given at launch, and after it.",
    written=("host_data",),
    unless_zero=True,
)
_LAUNCHED: Final = (
    _MinimumTcb(
        "minimum_tcb",
        _read_minimum,
        "The least versions of firmware and microcode, by product. Raise them in time.",
    ),
    limit("vmpl", 3, "software of privilege level {} passes, below the guest's kernel."),
    limit("migration", 1, "guests pass that a migration agent may move to another machine."),
    refused_unless(
        "vlek",
        "vlek",
        "reports pass that a cloud provider's key signed; they do not name the chip.",
    ),
)
_NEEDS: Final = (
    Need("minimum_tcb", "hosts pass whose firmware and microcode have known holes"),
    Need(
        "launch_tcb",
        "guests pass that were launched before the host's firmware was repaired",
        only_with="minimum_tcb",
        holds=True,
    ),
    Need("guest_svn", "every older image that the signer signed passes", only_with="signers"),
    Need("platform_info", "hosts pass whatever their memory checks, SMT and power reporting are"),
)


def snp_form(
    booted: tuple[Rule, ...] = (), limits: tuple[Rule, ...] = (), needs: tuple[Need, ...] = ()
) -> TableForm:
    """The form of SNP evidence. `booted`: rules for what the guest booted, if evidence shows it."""
    svn = "The least security version of images by these signers."
    platform = "What the host's platform must report."
    return TableForm(
        rules=(
            measurements(48),
            Rule("signers", digests(48)),
            _REGISTERS,
            *booted,
            *_LAUNCHED,
            *limits,
            _GuestSvn("guest_svn", number(0, 2**32 - 1, None), svn),
            _Platform("platform_info", _read_platform, platform),
        ),
        needs=(*_NEEDS, *needs),
        one_of=(("measurements", "signers"), *((("pcrs", "events"),) if booted else ())),
    )
