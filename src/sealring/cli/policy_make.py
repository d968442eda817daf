"""`sealring policy new` and `policy upgrade`: strict policies, from evidence or by asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence import (
    Cache,
    Evidence,
    Policy,
    describe_evidence,
    parse_evidence,
    parse_policy,
    read_cache,
)
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.kinds import KINDS
from sealring.attest.evidence.policy_upgrade import upgrade as upgraded
from sealring.attest.evidence.policy_words import explain
from sealring.attest.evidence.policy_writing import (
    Table,
    check_admits,
    new_policy,
    tables_from,
)
from sealring.attest.evidence.snp import PLATFORM_BITS, TCB_BYTES
from sealring.cli.terminal import errors, say
from sealring.errors import AttestationError, BadPolicy, ConfigurationError
from sealring.formats.files import read_public, write_public

EvidenceFiles = Annotated[
    list[Path] | None, typer.Option(help="Evidence of a machine (`sealring attest --out`).")
]
CacheFolder = Annotated[
    Path | None, typer.Option(help="Folder of lists, OCSP answers, collateral and references.")
]
Out = Annotated[Path | None, typer.Option(help="Write the policy there, not to the terminal.")]
At = Annotated[
    datetime | None, typer.Option(help="Judge all dates as of this time (UTC), not now.")
]
_OWN_ROOTS: Final = ("tpm", "simulated")


def new(
    evidence: EvidenceFiles = None,
    job: Annotated[str | None, typer.Option(help="The only job that may be joined.")] = None,
    cache: CacheFolder = None,
    out: Out = None,
    at: At = None,
) -> None:
    """Write a commented, strict policy that admits what some evidence shows; or ask for each rule.

    The evidence's signatures, chains and dates are verified; for whom it was made is not. So make
    it on a machine that you trust, and compare its measurements with your own build.
    """
    shown = _read(evidence or (), cache, at)
    text = new_policy(job, shown.tables() if evidence else _ask())
    policy = parse_policy(text)
    missing = shown.not_at_hand(policy)
    _write(text, out)
    for clause in explain(policy):
        if clause.open:
            errors.print(f"LEFT OPEN {clause.about}: {clause.text}", markup=False, soft_wrap=True)
    for told in missing:
        errors.print(f"NOT AT HAND {told}", markup=False, highlight=False, soft_wrap=True)


def upgrade(
    policy: Annotated[Path, typer.Argument(help="The policy, a TOML file.")],
    evidence: EvidenceFiles = None,
    cache: CacheFolder = None,
    out: Out = None,
    at: At = None,
) -> None:
    """Add the rules that a policy of an older sealring lacks, and say what was added.

    Values come from evidence, where some is given. A rule without a value is left open by name.
    """
    try:
        text = read_public(policy, "the policy", BadPolicy).decode()
    except UnicodeDecodeError:
        raise BadPolicy(f"the policy {policy} is not UTF-8 text") from None
    made, changes = upgraded(text, _read(evidence or (), cache, at).tables())
    _write(made, out)
    for change in changes:
        mark = "LEFT OPEN" if change.open else "ADDED"
        told = f"{mark} {change.table}.{change.rule}: {change.text}"
        errors.print(told, markup=False, highlight=False, soft_wrap=True)
    if not changes:
        errors.print("The policy lacks no rule: nothing was added.", highlight=False)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        say(text.rstrip())
        return
    write_public(out, text.encode())
    errors.print(f"{out} was written.", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Evidence of machines, verified but for its binding; and what it was verified with."""

    evidence: Mapping[Path, Evidence]
    roots: Mapping[str, list[str]]
    """By kind, where a policy names them: a TPM's maker is believed by the evidence's own word."""
    kept: Cache
    now: datetime

    def tables(self) -> dict[str, Table]:
        simulated, tpm = (frozenset(self.roots.get(kind, ())) for kind in ("simulated", "tpm"))
        trust = self.kept.trust_roots(simulated, tpm, self.now)
        workers = [describe_evidence(one, trust) for one in self.evidence.values()]
        return tables_from(workers, self.roots)

    def not_at_hand(self, policy: Policy) -> list[str]:
        """What the policy asks of a verifier's cache, and is not in this one's.

        AttestationError: no policy admits one of the machines.
        """
        trust = self.kept.trust(policy, self.now)
        found = []
        for path, one in self.evidence.items():
            try:
                rules = check_admits(policy, describe_evidence(one, trust))
            except AttestationError as problem:
                raise type(problem)(f"no policy can be written from {path}: {problem}") from None
            found += [f"{rule.name}: {rule.found}; wanted: {rule.wanted}" for rule in rules]
        return list(dict.fromkeys(found))


def _read(paths: Sequence[Path], cache: Path | None, at: datetime | None) -> _Shown:
    now = at.replace(tzinfo=UTC) if at else datetime.now(UTC)
    kept = read_cache(cache, now) if cache else Cache()
    evidence: dict[Path, Evidence] = {}
    roots: dict[str, list[str]] = {}
    for path in paths:
        sent = parse_evidence(read_public(path, "the evidence", ConfigurationError))
        if sent.kind in _OWN_ROOTS:
            roots.setdefault(sent.kind, []).append(_root(sent))
        evidence[path] = sent
    return _Shown(evidence, roots, kept, now)


def _root(evidence: Evidence) -> str:
    if not evidence.chain:
        raise ConfigurationError("the evidence brings no certificates")
    return load_certificate(evidence.chain[-1]).fingerprint(SHA256()).hex()


def _ask() -> dict[str, Table]:
    kind = _choice("Kind of evidence", [one for one in KINDS if one != "simulated"])
    table: Table = {}
    left: list[str] = []

    def each(name: str, question: str) -> list[str]:
        answer = _prompt(f"{question} (several with spaces; empty: none)", default="")
        found = answer.split()
        if not found:
            left.append(name)
        return found

    if kind == "tpm":
        table["roots"] = each("roots", "SHA-256 of the TPM maker's root certificate")
        left.clear()
    else:
        table["measurements"] = each("measurements", "Measurements, hexadecimal")
        left.clear()
    if "snp" in kind:
        table |= _ask_snp(left)
    if kind == "tdx":
        names = ("rtmr0", "rtmr1", "rtmr2")
        found = {name: each(name, f"Values of {name}") for name in names}
        table["registers"] = {name: values for name, values in found.items() if values}
    if kind in ("tpm", "az-snp-vtpm", "az-tdx-vtpm"):
        numbers = (0, 4, 7) if kind == "tpm" else (4, 7)
        found = {str(pcr): each(f"pcr{pcr}", f"Values of PCR {pcr}") for pcr in numbers}
        table["pcrs"] = {pcr: values for pcr, values in found.items() if values}
        # A list of files is not typed in: it comes from evidence, or is added by hand.
        left.append("ima")
    if left:
        table["unchecked"] = left
    return {kind: {name: value for name, value in table.items() if value}}


def _ask_snp(left: list[str]) -> Table:
    table: Table = {}
    minimum: Table = {}
    for product, parts in TCB_BYTES.items():
        asked = f"{product}: least versions of {' '.join(parts)} (empty: not admitted)"
        versions = _prompt(asked, default="").split()
        if versions:
            if len(versions) != len(parts) or not all(one.isdigit() for one in versions):
                raise ConfigurationError(f"{product} takes {len(parts)} numbers")
            minimum[product] = dict(zip(parts, map(int, versions), strict=True))
    if minimum:
        table["minimum_tcb"] = minimum
    else:
        left.append("minimum_tcb")
    platform = {}
    for name in PLATFORM_BITS:
        answer = _choice(f"Platform's {name}", ["on", "off", "any"], default="any")
        if answer != "any":
            platform[name] = answer == "on"
    if platform:
        table["platform_info"] = platform
    else:
        left.append("platform_info")
    return table


def _choice(question: str, known: Sequence[str], default: str | None = None) -> str:
    answer = _prompt(f"{question} ({', '.join(known)})", default=default)
    if answer not in known:
        raise ConfigurationError(f"{question} is one of {', '.join(known)}")
    return answer


def _prompt(question: str, default: str | None) -> str:
    """On stderr: stdout is the policy, and may be a file."""
    return str(typer.prompt(question, default=default, err=True))
