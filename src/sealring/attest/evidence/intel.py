"""Intel TDX and SGX, through dcap-qvl: the quote, its chain, and Intel's word on the platform.

A quote is judged together with collateral: signed statements of Intel's on which TCB levels are up
to date, and its revocation lists. They are fetched beforehand and kept; how old they are is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence.chains import VerifiedChain, split_pem, verify_chain
from sealring.attest.evidence.encoding import P256_ORDER, Cursor, check_spelling, with_lower_s
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.intel_collateral import SGX, TDX, Collateral
from sealring.attest.evidence.revocation import out_of_dates
from sealring.attest.evidence.rules import (
    Events,
    Finding,
    Form,
    MinimumTcb,
    Need,
    Registers,
    Rule,
    Rules,
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
from sealring.attest.evidence.tpm.event_log import (
    EV_NO_ACTION,
    only_pcrs,
    parse_event_log,
    replay,
    without_filling,
)
from sealring.attest.evidence.tpm.structures import SHA384
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import Claims, DescribedWorker
from sealring.core.identity.loading import certificate_from_der, revocation_list_from
from sealring.errors import (
    AttestationError,
    BadCollateral,
    ConfigurationError,
    ForgedEvidence,
    MalformedEvidence,
    PolicyRefusal,
    UnknownEvidence,
    UntrustedChain,
)
from sealring.formats.strict import read_json

CCEL: Final = Path("/sys/firmware/acpi/tables/data/CCEL")
_REGISTERS: Final = {n + 1: f"rtmr{n}" for n in range(4)}


def check_ccel(log: bytes, registers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The digests that each RTMR was extended with, if the log leads to what was quoted."""
    events = parse_event_log(log, SHA384)
    for number, value in replay(events, SHA384).items():
        name = _REGISTERS.get(number, "")
        if registers.get(name) != value.hex():
            raise ForgedEvidence(f"the event log does not lead to the value of {name or number}")
    found: dict[str, list[str]] = {}
    for event in events:
        if event.kind != EV_NO_ACTION:
            found.setdefault(_REGISTERS[event.pcr], []).append(event.digest.hex())
    return {name: tuple(digests) for name, digests in found.items()}


def matching_ccel(registers: Mapping[str, str], path: Path = CCEL) -> bytes:
    """This guest's log, where its firmware left one."""
    try:
        return matching_events(path.read_bytes(), registers)
    except OSError:
        return b""


def matching_events(padded: bytes, registers: Mapping[str, str]) -> bytes:
    """The log's events for the RTMRs that nothing has extended since without telling it."""
    try:
        log = without_filling(padded)
        expected = replay(parse_event_log(log, SHA384), SHA384)
    except (MalformedEvidence, UnknownEvidence):
        return b""
    same = {
        number
        for number, value in expected.items()
        if registers.get(_REGISTERS.get(number, "")) == value.hex()
    }
    return only_pcrs(log, same) if same else b""


def check_statements(text: str, family: str, trust: Trust) -> None:
    """Raises BadCollateral if a statement or a list in the file is not signed by Intel.

    With the code evidence.stale_revocation_list: its signer's certificate is not valid now.
    UntrustedChain, evidence.chain_revoked: Intel revoked it.
    """
    fields: dict[str, Any] = read_json(text)
    try:
        for name in ("tcb_info", "qe_identity"):
            signer = _signer(fields[f"{name}_issuer_chain"], trust)
            signature = bytes.fromhex(fields[f"{name}_signature"])
            half = len(signature) // 2
            numbers = (int.from_bytes(part, "big") for part in (signature[:half], signature[half:]))
            _public(signer).verify(
                encode_dss_signature(*numbers), fields[name].encode(), ec.ECDSA(SHA256())
            )
        chain = split_pem(fields["pck_crl_issuer_chain"].encode())
        _signer(fields["pck_crl_issuer_chain"], trust)
        for name, issuer in (("pck_crl", chain[0]), ("root_ca_crl", chain[-1])):
            found = revocation_list_from(bytes.fromhex(fields[name]), ValueError(name))
            key = _public(certificate_from_der(issuer, ValueError(name)))
            if not found.is_signature_valid(key):
                raise InvalidSignature
    except (InvalidSignature, KeyError, TypeError, ValueError, AttestationError) as problem:
        code = problem.code if isinstance(problem, AttestationError) else ""
        if code == "evidence.chain_revoked":
            raise
        if code == "evidence.chain_expired":
            raise BadCollateral(
                f"this verifier's own Intel collateral for {family} is not in force, fetch it "
                f"again or set the clock: {problem}",
                code="evidence.stale_revocation_list",
            ) from None
        raise BadCollateral(
            f"this verifier's own Intel collateral for {family} is not signed by Intel: the worker "
            "is not to blame; fetch the file again"
        ) from None


def _signer(pem: str, trust: Trust) -> x509.Certificate:
    return verify_chain(split_pem(pem.encode()), trust.intel, trust).leaf


def _public(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("Intel signs with keys on P-256")
    return key


_TEES: Final = {TDX: 0x81, SGX: 0x00}
_HEADER_BYTES: Final = 48
_BODY_BYTES: Final = {3: 384, 4: 584}
_PEM_CHAIN, _QE_REPORT = 5, 6
_SIGNATURE_BYTES, _ENCLAVE_BYTES = 64, 384
_DEBUG: Final = {TDX: 1, SGX: 2}


def quote_size(data: bytes) -> int:
    """The length that a quote states. One that is cut or extended is refused by it."""
    return _signature(data)[0]


def pck_chain(data: bytes) -> tuple[bytes, ...]:
    """The platform's certificates, out of the one frame that is accepted around them."""
    _, version, signature = _signature(data)
    cursor = Cursor(signature, "the quote's signature", "little")
    cursor.take(64 + 64)
    if version > 3:
        if cursor.number(2) != _QE_REPORT:
            raise UnknownEvidence("the quote's certification is of a type that is not known")
        inner = cursor.sized(4)
        cursor.end()
        cursor = Cursor(inner, "the quote's certification", "little")
    cursor.take(384 + 64)
    cursor.sized(2)
    if cursor.number(2) != _PEM_CHAIN:
        raise UnknownEvidence("the quote does not hold its chain of certificates")
    # Some quoting enclaves end the text as C does.
    text = cursor.sized(4).removesuffix(b"\0")
    cursor.end()
    return split_pem(text)


def canonical_quote(data: bytes) -> bytes:
    """As a worker sends it: the quote's signature and the quoting enclave's in one spelling.

    And without the zero at the end of its certificates, which no signature covers.
    """
    end, version, signature = _signature(data)
    start = end - len(signature)
    # Behind the quote's signature and its key, and from version 4 on a type and a length, stand the
    # quoting enclave's report and the signature over it.
    enclave = start + 2 * _SIGNATURE_BYTES + (6 if version > 3 else 0) + _ENCLAVE_BYTES
    half = _SIGNATURE_BYTES // 2
    for at in (start, enclave):
        data = with_lower_s(data, at + half, half, P256_ORDER)
    cursor = Cursor(data[:end], "the quote", "little")
    cursor.take(enclave + _SIGNATURE_BYTES)
    cursor.sized(2)
    cursor.take(2)
    chain = cursor.at
    if not cursor.sized(4).endswith(b"\0"):
        return data
    # Each length that counts the zero: the signature's, the certification's, the certificates'.
    lengths = [start - 4, *([start + 2 * _SIGNATURE_BYTES + 2] if version > 3 else []), chain]
    for at in lengths:
        shorter = int.from_bytes(data[at : at + 4], "little") - 1
        data = data[:at] + shorter.to_bytes(4, "little") + data[at + 4 :]
    return data[: end - 1] + data[end:]


def _signature(data: bytes) -> tuple[int, int, bytes]:
    """Where the quote ends, its version, and the signature with all that belongs to it."""
    cursor = Cursor(data, "the quote", "little")
    version = cursor.number(2)
    cursor.take(_HEADER_BYTES - 2)
    if version == 5:
        cursor.take(2)
        cursor.sized(4)
    elif version in _BODY_BYTES:
        cursor.take(_BODY_BYTES[version])
    else:
        raise UnknownEvidence(f"quotes of version {version} are not known")
    signature = cursor.sized(4)
    return cursor.at, version, signature


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
    return replace(claims, events=check_ccel(log, claims.registers)) if log else claims


def registers_of(quote: bytes) -> dict[str, str]:
    """The RTMRs of a TDX quote of this machine's own: nothing of it is verified here."""
    body = _HEADER_BYTES + (6 if quote[:2] == b"\x05\0" else 0)
    return {f"rtmr{n}": quote[body + 328 + 48 * n :][:48].hex() for n in range(4)}


def verify_quote(raw: bytes, kind: str, trust: Trust) -> tuple[Claims, bytes]:
    """That Intel's hardware signed these bytes; the report data says for whom."""
    qvl = _dcap_qvl()
    if quote_size(raw) != len(raw):
        raise MalformedEvidence(f"the quote has {len(raw)} bytes, and states fewer")
    whole = pck_chain(raw)
    try:
        quote = qvl.parse_quote(raw)
        family = quote.fmspc().upper()
    except ValueError as problem:
        raise MalformedEvidence(f"the quote cannot be read: {problem}") from None
    if quote.header.tee_type != _TEES[kind]:
        raise UnknownEvidence(f"the quote is not a {kind} quote")
    collateral = _fitting(trust, kind, family)
    lists = (*trust.lists, *collateral.lists)
    chain = verify_chain(whole, trust.intel, replace(trust, lists=lists))
    check_statements(collateral.text, family, replace(trust, lists=lists))
    # dcap-qvl refuses debug guests too, but among other things: this one has its own error.
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
    """dcap-qvl has one exception. Its words tell what cannot be told from the quote beforehand."""
    said = " ".join(problem.split())
    if "CertRevoked" in said:
        return UntrustedChain(
            f"Intel has revoked a certificate of its own statements: {said}",
            code="evidence.chain_revoked",
        )
    if any(words in said for words in ("Expired", "expired", "NotValidYet", "not valid yet")):
        return BadCollateral(
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
    while "base" in body:  # TDX 1.5 reports hold what 1.0 reports hold, and more.
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
        raise BadCollateral(
            f"there is no Intel collateral for {kind} platforms {family}: fetch it",
            code="evidence.stale_revocation_list",
        )
    newest = max(fitting, key=lambda one: one.until)
    made = max(one.made for one in newest.statements)
    if not made <= trust.now <= newest.until:
        raise BadCollateral(
            f"the Intel collateral for {family}, made {made:%Y-%m-%d %H:%M}, is not in force at "
            f"{trust.now:%Y-%m-%d %H:%M}: {out_of_dates(made, trust.now, 'fetch it again')}",
            code="evidence.stale_revocation_list",
        )
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
    (*_REGISTERS.values(), "mrconfigid", "mrowner", "mrownerconfig"), (48,)
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
TDX_FORM: Final = Form(
    rules=(
        measurements(48),
        tdx_registers("rtmr0", "rtmr1", "rtmr2"),
        Events("events", digest_lists(dict.fromkeys(_REGISTERS.values(), (48,)))),
        *TDX_TCB,
    ),
    needs=_TDX_NEEDS,
    one_of=(("measurements",),),
)
SGX_FORM: Final = Form(
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
