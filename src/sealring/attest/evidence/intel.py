"""Intel TDX and SGX, checked by dcap-qvl: the quote, its chain, and Intel's word on the platform.

A quote is judged with collateral: Intel's signed statements about which TCB levels are up to date,
and its revocation lists. They are fetched beforehand and kept, and their age is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence.chains import (
    VerifiedChain,
    split_pem,
    stale,
    verify_chain,
)
from sealring.attest.evidence.encoding import (
    P256_ORDER,
    Cursor,
    at,
    check_ecdsa,
    check_spelling,
    numbers_of,
    read_structure,
    unknown_evidence,
    with_lower_s,
)
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.rules import (
    Events,
    Finding,
    MinimumTcb,
    Need,
    Registers,
    Rule,
    Rules,
    TableForm,
    Workers,
    any_of,
    digest_lists,
    digests,
    measurements,
    minimum_of,
    numbers,
    some,
    words,
)
from sealring.attest.evidence.tpm.event_log import RTMR_NAMES, check_log, matching_log
from sealring.attest.evidence.tpm.structures import SHA384
from sealring.attest.evidence.trust import SGX, TDX, Collateral, Trust
from sealring.attest.evidence.worker import Claims, DescribedWorker
from sealring.core.identity.loading import certificate_from_der, revocation_list_from
from sealring.errors import (
    AttestationError,
    ConfigurationError,
    ForgedEvidence,
    MalformedEvidence,
    PolicyRefusal,
    UntrustedChain,
)
from sealring.formats.strict import read_json

CCEL: Final = Path("/sys/firmware/acpi/tables/data/CCEL")


@dataclass(frozen=True, slots=True)
class TdBody:
    """What the guest was launched as, and measured since. Reading it does not verify it."""

    mrtd: bytes = at(136, 48)
    rtmr0: bytes = at(328, 48)
    rtmr1: bytes = at(376, 48)
    rtmr2: bytes = at(424, 48)
    rtmr3: bytes = at(472, 48)


def matching_events(quote: bytes, log: bytes) -> dict[str, bytes]:
    """The event log that explains how the RTMRs of this quote came to their values, if it fits."""
    body = read_structure(TdBody, parse_quote(quote).body, "the TDX report")
    registers = {name: getattr(body, name).hex() for name in RTMR_NAMES.values()}
    found = matching_log(log, registers, SHA384, RTMR_NAMES)
    return {"event_log": found} if found else {}


def check_statements(text: str, family: str, trust: Trust) -> None:
    """Raises evidence.bad_collateral if a statement or a list in the file is not signed by Intel.

    If the signer's certificate is not valid now, the code is evidence.stale_revocation_list. If
    Intel revoked it: UntrustedChain, evidence.chain_revoked.
    """
    fields: dict[str, Any] = read_json(text)
    try:
        for name in ("tcb_info", "qe_identity"):
            signer = _signer(fields[f"{name}_issuer_chain"], trust)
            check_ecdsa(
                signer.public_key(),
                numbers_of(bytes.fromhex(fields[f"{name}_signature"])),
                fields[name].encode(),
                name,
                curve=ec.SECP256R1,
                algorithm=SHA256(),
            )
        chain = split_pem(fields["pck_crl_issuer_chain"].encode())
        _signer(fields["pck_crl_issuer_chain"], trust)
        for name, issuer in (("pck_crl", chain[0]), ("root_ca_crl", chain[-1])):
            found = revocation_list_from(bytes.fromhex(fields[name]), ValueError(name))
            key = certificate_from_der(issuer, ValueError(name)).public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or not found.is_signature_valid(key):
                raise ForgedEvidence(f"{name} is not signed by its issuer")
    except (KeyError, TypeError, ValueError, AttestationError) as problem:
        code = problem.code if isinstance(problem, AttestationError) else ""
        if code == "evidence.chain_revoked":
            raise
        if code == "evidence.chain_expired":
            raise AttestationError(
                f"this verifier's own Intel collateral for {family} is not in force, fetch it "
                f"again or set the clock: {problem}",
                code="evidence.stale_revocation_list",
            ) from None
        raise AttestationError(
            f"this verifier's own Intel collateral for {family} is not signed by Intel: the worker "
            "is not to blame; fetch the file again",
            code="evidence.bad_collateral",
        ) from None


def _signer(pem: str, trust: Trust) -> x509.Certificate:
    return verify_chain(split_pem(pem.encode()), trust.intel, trust).leaf


_TEES: Final = {TDX: 0x81, SGX: 0x00}
_HEADER_BYTES: Final = 48
_BODY_BYTES: Final = {3: 384, 4: 584}
_BODIES_OF_VERSION_5: Final = (384, 584, 648)
_PEM_CHAIN, _QE_REPORT = 5, 6
_SIGNATURE_BYTES, _ENCLAVE_BYTES = 64, 384
_DEBUG: Final = {TDX: 1, SGX: 2}


@dataclass(frozen=True, slots=True)
class Quote:
    """The places of those parts of a quote that are checked here. dcap-qvl reads the rest."""

    end: int
    """The length that the quote states."""
    body: bytes
    signatures: tuple[int, int]
    """Offsets of two signatures: over the quote, and over the quoting enclave's report."""
    lengths: tuple[int, ...]
    """Offsets of those lengths that count the certificates too."""
    certificates: bytes


def parse_quote(data: bytes) -> Quote:
    """Finds the parts of a quote. Only one layout around the certificates is accepted."""
    cursor = Cursor(data, "the quote", "little")
    version = cursor.number(2)
    cursor.take(_HEADER_BYTES - 2)
    if version == 5:
        cursor.take(2)
        body = cursor.sized(4)
        if len(body) not in _BODIES_OF_VERSION_5:
            raise MalformedEvidence(f"no quote is about {len(body)} bytes")
    elif version in _BODY_BYTES:
        body = cursor.take(_BODY_BYTES[version])
    else:
        raise unknown_evidence(f"quotes of version {version} are not known")
    lengths = [cursor.at]
    size = cursor.number(4)
    signature, end = cursor.at, cursor.at + size
    cursor.take(2 * _SIGNATURE_BYTES)
    if version > 3:
        if cursor.number(2) != _QE_REPORT:
            raise unknown_evidence("the quote's certification is of a type that is not known")
        lengths.append(cursor.at)
        if cursor.number(4) != end - cursor.at:
            raise MalformedEvidence("the quote's certification is not of the length that it states")
    cursor.take(_ENCLAVE_BYTES)
    enclave = cursor.at
    cursor.take(_SIGNATURE_BYTES)
    cursor.sized(2)
    if cursor.number(2) != _PEM_CHAIN:
        raise unknown_evidence("the quote does not hold its chain of certificates")
    lengths.append(cursor.at)
    certificates = cursor.sized(4)
    if cursor.at != end:
        raise MalformedEvidence("the quote's signature is not of the length that it states")
    return Quote(end, body, (signature, enclave), tuple(lengths), certificates)


def canonical_quote(data: bytes) -> bytes:
    """The quote as a worker sends it.

    Both signatures are in their one spelling. Nothing follows the quote, and the zero at the end
    of its certificates, which no signature covers, is removed.
    """
    quote, half = parse_quote(data), _SIGNATURE_BYTES // 2
    for start in quote.signatures:
        data = with_lower_s(data, start + half, half, P256_ORDER)
    if not quote.certificates.endswith(b"\0"):
        return data[: quote.end]
    for start in quote.lengths:
        shorter = int.from_bytes(data[start : start + 4], "little") - 1
        data = data[:start] + shorter.to_bytes(4, "little") + data[start + 4 :]
    return data[: quote.end - 1]


def verify_intel(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    if evidence.kind == TDX:
        raw, log = evidence.only("quote", optional=("event_log",))
    else:
        (raw,), log = evidence.only("quote"), b""
    check_spelling(raw, canonical_quote(raw), "the quote")
    if evidence.chain:
        raise MalformedEvidence("an Intel quote holds its chain itself")
    claims, bound = verify_quote(raw, evidence.kind, trust)
    evidence.check_bound(bound, challenge, "the quote")
    if not log:
        return claims
    return replace(claims, events=check_log(log, claims.registers, SHA384, RTMR_NAMES))


def verify_quote(raw: bytes, kind: str, trust: Trust) -> tuple[Claims, bytes]:
    """Verifies that Intel's hardware signed the quote. Returns its claims and report data."""
    qvl = _dcap_qvl()
    parsed = parse_quote(raw)
    if parsed.end != len(raw):
        raise MalformedEvidence(f"the quote has {len(raw)} bytes, and states fewer")
    # Some quoting enclaves end the text with a zero byte, as C does.
    whole = split_pem(parsed.certificates.removesuffix(b"\0"))
    try:
        quote = qvl.parse_quote(raw)
        family = quote.fmspc().upper()
    except ValueError as problem:
        raise MalformedEvidence(f"the quote cannot be read: {problem}") from None
    if quote.header.tee_type != _TEES[kind]:
        raise unknown_evidence(f"the quote is not a {kind} quote")
    collateral = _fitting(trust, kind, family)
    lists = (*trust.lists, *collateral.lists)
    chain = verify_chain(whole, trust.intel, replace(trust, lists=lists))
    check_statements(collateral.text, family, replace(trust, lists=lists))
    # dcap-qvl refuses debug guests too, but with no error of its own. Here they get one.
    attributes = quote.report.td_attributes if kind == TDX else quote.report.attributes
    if attributes[0] & _DEBUG[kind]:
        raise PolicyRefusal(
            f"the {kind} guest can be debugged: its host reads its memory",
            code="policy.debug_guest",
        )
    try:
        report = qvl.verify_with_root_ca(
            raw,
            qvl.QuoteCollateralV3.from_json(collateral.text),
            whole[-1],
            int(trust.now.timestamp()),
        )
    except ValueError as problem:
        raise _refusal(kind, str(problem)) from None
    return _claims(kind, read_json(report.to_json()), chain, collateral)


def _refusal(kind: str, problem: str) -> AttestationError:
    """The error for a failure of dcap-qvl. It raises one exception, so its text decides."""
    said = " ".join(problem.split())
    if "CertRevoked" in said:
        return UntrustedChain(
            f"Intel has revoked a certificate of its own statements: {said}",
            code="evidence.chain_revoked",
        )
    if any(words in said for words in ("Expired", "expired", "NotValidYet", "not valid yet")):
        return AttestationError(
            f"Intel's statements are not in force, fetch them again or set the clock: {said}",
            code="evidence.stale_revocation_list",
        )
    if "TCB level" in said:
        return PolicyRefusal(
            f"Intel lists no TCB level that this platform has: {said}", code="policy.tcb_too_old"
        )
    if "enabled" in said or "service TD" in said:
        return PolicyRefusal(
            f"no {kind} guest may be launched like this: {said}", code="policy.guest_not_allowed"
        )
    return ForgedEvidence(f"the {kind} quote does not verify: {said}")


def _claims(
    kind: str, report: dict[str, Any], chain: VerifiedChain, collateral: Collateral
) -> tuple[Claims, bytes]:
    (body,) = report["report"].values()
    while "base" in body:  # a TDX 1.5 report holds a 1.0 report as its base
        body = body | body.pop("base")
    shared = Claims(
        product=kind.upper(),
        machine=report["ppid"],
        tcb={"evaluation": collateral.evaluation},
        tcb_status=report["status"],
        advisories=tuple(report["advisory_ids"]),
        lists=(*chain.lists, *collateral.statements),
        unlisted=chain.unlisted,
        not_after=min(chain.not_after, collateral.until),
    )
    bound = bytes.fromhex(body["report_data"])
    if kind == SGX:
        claims = replace(
            shared,
            measurement=body["mr_enclave"],
            signer=body["mr_signer"],
            registers={"isvprodid": f"{body['isv_prod_id']:04x}"},
            tcb={**shared.tcb, "isvsvn": body["isv_svn"]},
        )
        return claims, bound
    names = ("rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "mr_config_id", "mr_owner", "mr_owner_config")
    claims = replace(
        shared,
        measurement=body["mr_td"],
        registers={name.replace("_", ""): body[name] for name in names},
        tcb={**shared.tcb, "module": bytes.fromhex(body["tee_tcb_svn"])[0]},
    )
    return claims, bound


def _fitting(trust: Trust, kind: str, family: str) -> Collateral:
    fitting = [one for one in trust.collateral if (one.tee, one.fmspc) == (kind, family)]
    if not fitting:
        raise AttestationError(
            f"there is no Intel collateral for {kind} platforms {family}: fetch it",
            code="evidence.stale_revocation_list",
        )
    newest = max(fitting, key=lambda one: one.until)
    made = max(one.made for one in newest.statements)
    if not made <= trust.now <= newest.until:
        raise stale(f"Intel collateral for {family}", made, trust.now)
    return newest


def _dcap_qvl() -> ModuleType:
    try:
        import dcap_qvl
    except ImportError:
        raise ConfigurationError(
            "Intel quotes need dcap-qvl to be judged: pip install 'sealring[tdx]'",
            code="configuration.missing_extra",
        ) from None
    module: ModuleType = dcap_qvl
    return module


_STATUSES: Final = {
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded",
    "OutOfDate", "OutOfDateConfigurationNeeded",
}  # fmt: skip


class _MinimumTcb(MinimumTcb):
    def stated(self, value: Mapping[str, Mapping[str, int]]) -> Collection[str]:
        return [part for parts in value.values() for part in parts]

    def weak(self, rules: Rules) -> Iterable[str]:
        yield from MinimumTcb.weak(self, rules)
        if rules.get("signers") and rules[self.name].get("SGX", {}).get("isvsvn") == 0:
            yield f"isvsvn: {rules.form.passes('isvsvn')}, since 0 is any."


def _minimum(own: str, product: str) -> Rule:
    return _MinimumTcb("minimum_tcb", minimum_of(product, numbers({own, "evaluation"}, 65535)))


class _TcbStatus(Rule):
    refusal = "policy.tcb_too_old"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        good, found = rules[self.name], " ".join((worker.tcb_status, *worker.advisories))
        yield "tcb status", worker.tcb_status in good, any_of(good), found

    def weak(self, rules: Rules) -> Iterable[str]:
        if others := rules[self.name] - {"UpToDate"}:
            yield f"{self.name}: platforms pass that Intel calls {any_of(others)}."

    def write(self, workers: Workers) -> Any:
        statuses = _STATUSES.intersection(one.tcb_status for one in workers)
        return sorted(statuses) if statuses - {"UpToDate"} else None


_STATUS: Final = _TcbStatus(
    "tcb_status",
    some(words(_STATUSES, ["UpToDate"])),
    "What Intel calls the TCB. Update the machines, then leave UpToDate alone.",
)
_TDX_BYTES: Final = dict.fromkeys(
    (*RTMR_NAMES.values(), "mrconfigid", "mrowner", "mrownerconfig"), (48,)
)
_TDX_NEEDS: Final = (
    Need("rtmr0", "any configuration of the firmware passes, with Secure Boot on or off"),
    Need("rtmr1", "any boot loader and kernel pass, since MRTD is of the firmware alone"),
    Need("rtmr2", "any kernel command line and initial RAM disk pass"),
)


def tdx_registers(*written: str) -> Rule:
    comment = "What was measured or given at launch, and after it."
    return Registers("registers", digest_lists(_TDX_BYTES), comment, written=written)


TDX_TCB: Final = (_minimum("module", "TDX"), _STATUS)
TDX_FORM: Final = TableForm(
    rules=(
        measurements(48),
        tdx_registers("rtmr0", "rtmr1", "rtmr2"),
        Events("events", digest_lists(dict.fromkeys(RTMR_NAMES.values(), (48,)))),
        *TDX_TCB,
    ),
    needs=_TDX_NEEDS,
    one_of=(("measurements",),),
)
SGX_FORM: Final = TableForm(
    rules=(
        measurements(32),
        Rule("signers", digests(32)),
        Registers("registers", digest_lists({"isvprodid": (2,)})),
        _minimum("isvsvn", "SGX"),
        _STATUS,
    ),
    needs=(
        Need("isvsvn", "every older enclave that the signer signed passes", only_with="signers"),
        Need("isvprodid", "the signer's other products pass", only_with="signers"),
    ),
    one_of=(("measurements", "signers"),),
)
