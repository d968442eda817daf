"""`sealring policy`: makes evidence of this machine, writes policies, and checks evidence."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from rich.table import Table
from rich.text import Text

from sealring.attest.evidence import (
    Cache,
    Evidence,
    Policy,
    Verdict,
    describe_evidence,
    judge,
    parse_evidence,
    parse_policy,
    read_cache,
    verify_evidence,
)
from sealring.attest.evidence.attesters import Wanted, find_attester, make_simulator
from sealring.attest.evidence.cache import read_list, read_policy
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.evidence import NONCE_BYTES
from sealring.attest.evidence.guest import GuestAnswer, ask
from sealring.attest.evidence.policy import (
    PolicyTable,
    check_admits,
    explain,
    new_policy,
    tables_asked,
    tables_from,
)
from sealring.attest.evidence.snp import parse_report
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.credential import seal_credential
from sealring.attest.evidence.tpm.machine import QUOTED, TpmMachine
from sealring.attest.evidence.tpm.structures import BANKS, parse_public
from sealring.attest.evidence.tpm.verify import registers
from sealring.attest.evidence.trust import TDX
from sealring.attest.evidence.verify import DEVICE_KINDS, KINDS
from sealring.cli.terminal import console, errors, print_json, say
from sealring.core.settings import TPM
from sealring.errors import AttestationError, AttestationUnavailable, ConfigurationError, named
from sealring.formats.files import read_public, write_public

CacheFolder = Annotated[
    Path | None, typer.Option(help="Folder of lists, OCSP answers, collateral and references.")
]
At = Annotated[
    datetime | None, typer.Option(help="Judge all dates as of this time (UTC), not now.")
]

app = typer.Typer(help="Make and judge evidence, and write policies.", no_args_is_help=True)


@app.callback()
def policy() -> None:
    """Make and judge evidence, and write policies."""


@app.command()
def check(
    policy: Annotated[Path, typer.Argument(help="The policy, a TOML file.")],
    evidence: Annotated[
        Path | None, typer.Argument(help="Evidence, of a worker or of `policy attest --out`.")
    ] = None,
    nonce: Annotated[
        str | None, typer.Option(help="Insist on this nonce (hex), not on what the file says.")
    ] = None,
    without_binding: Annotated[
        bool,
        typer.Option(
            "--without-binding",
            help="Judge everything but for whom the evidence was made: anybody could show it.",
        ),
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Judge it for this rank.")] = None,
    revocation_list: Annotated[
        list[Path] | None, typer.Option(help="A vendor's revocation list, DER or PEM.")
    ] = None,
    cache: CacheFolder = None,
    at: At = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say in words what a policy lets in; with evidence, rule by rule why it passes or does not.

    Exit status 1 if the evidence does not pass.
    """
    rules, _ = read_policy(policy)
    if evidence is None:
        _explain(rules, json)
        return
    if nonce and without_binding:
        raise ConfigurationError("--nonce asks for the binding, and --without-binding not to")
    asked = "not judged" if without_binding else "given" if nonce else "as the file says"
    shown: dict[str, Any] = {"admitted": False, "passed": False, "nonce": asked}
    try:
        sent = parse_evidence(read_public(evidence, "the evidence", ConfigurationError))
        now = at.replace(tzinfo=UTC) if at else datetime.now(UTC)
        kept = read_cache(cache, now) if cache else Cache()
        lists = tuple(read_list(path) for path in revocation_list or [])
        trust = replace(kept, lists=kept.lists + lists).trust(rules, now)
        shown |= {"at": now.isoformat(), "unusable_references": list(kept.expired)}
        own = sent.challenge
        challenge = replace(own, nonce=_nonce(nonce)) if nonce else own
        worker = (
            describe_evidence(sent, trust)
            if without_binding
            else verify_evidence(sent, challenge, trust)
        )
    except AttestationError as error:
        shown |= {"error": named(error), "message": str(error), "rules": []}
        verdict = None
    else:
        verdict = judge(rules, worker, rank)
        shown |= {"passed": verdict.admitted, "worker": worker.as_json()}
        shown["admitted"] = verdict.admitted and not without_binding
        shown["rules"] = [
            {
                "rule": rule.name,
                "passed": rule.refusal is None,
                "wanted": rule.wanted,
                "found": rule.found,
                "error": rule.refusal,
            }
            for rule in verdict.rules
        ]
    if json:
        print_json(shown)
    else:
        _print(shown, verdict)
    if not shown["passed"]:
        raise typer.Exit(1)


def _explain(rules: Policy, json: bool) -> None:
    clauses = explain(rules)
    if json:
        told = [{"about": one.about, "text": one.text, "open": one.open} for one in clauses]
        print_json({"clauses": told, "open": sum(one.open for one in clauses)})
        return
    for one in clauses:
        mark = "OPEN  " if one.open else "      "
        say(f"{mark}{one.about}: {one.text}")
    left = sum(one.open for one in clauses)
    holes = "1 hole is" if left == 1 else f"{left} holes are"
    say(f"{holes} left open by name." if left else "No known hole is left open.")


def _nonce(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigurationError("--nonce is hexadecimal") from None


def _print(shown: dict[str, Any], verdict: Verdict | None) -> None:
    if verdict is None:
        say(f"Refused before the policy was asked. {shown['error']}: {shown['message']}")
        if shown["error"] == "evidence.not_bound":
            say("--without-binding judges everything else.")
        return
    passed = "refused"
    if verdict.admitted:
        passed = "admitted" if shown["admitted"] else "passes, but is not admitted like this"
    table = Table(title=f"{verdict.label}: {passed}")
    for column in ("rule", "wanted", "found", ""):
        table.add_column(column)
    for rule in verdict.rules:
        outcome = Text(rule.refusal, "bold red") if rule.refusal else Text("ok", "green")
        table.add_row(rule.name, rule.wanted, Text(rule.found, overflow="fold"), outcome)
    console.print(table)
    for unusable in shown["unusable_references"]:
        say(f"Not used: {unusable}")
    if shown["nonce"] == "not judged":
        say(
            "For which nonce and key it was made was NOT judged (--without-binding): a recording "
            "of another machine passes as well. A broker refuses such evidence."
        )
        return
    if shown["nonce"] != "given":
        say("The nonce is the file's own: whether it is fresh was not judged (--nonce).")
    if verdict.label.startswith("tpm"):
        say("So is the TPM's credential: only the verifier that made it can judge it.")


_OWN_ROOTS: Final = ("tpm", "simulated")


@app.command()
def new(
    evidence: Annotated[
        list[Path] | None,
        typer.Option(help="Evidence of a machine (`sealring policy attest --out`)."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="The only job that may be joined.")] = None,
    cache: CacheFolder = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the policy there, not to the terminal.")
    ] = None,
    at: At = None,
    simulator: Annotated[
        Path | None,
        typer.Option(help="Make a source of SIMULATED evidence there, and its policy."),
    ] = None,
) -> None:
    """Write a commented, strict policy that admits what some evidence shows; or ask for each rule.

    The evidence's signatures, chains and dates are verified; for whom it was made is not. So make
    it on a machine that you trust, and compare its measurements with your own build. SIMULATED
    evidence, of --simulator, proves nothing: it is for trying things out.
    """
    if simulator is not None:
        if evidence:
            raise ConfigurationError("--simulator makes its own evidence: leave out --evidence")
        made = make_simulator(simulator)
        measurement = made.measurement.hex()
        table = {"roots": [made.simulator.fingerprint], "measurements": [measurement]}
        _write_policy(new_policy(job, {"simulated": table}), out)
        errors.print(f"Workers set SEALRING_ATTESTER=simulated:{simulator}", highlight=False)
        return
    shown = _read_evidence(evidence or (), cache, at)
    text = new_policy(job, shown.tables() if evidence else _ask())
    policy = parse_policy(text)
    missing = shown.not_at_hand(policy)
    _write_policy(text, out)
    for clause in explain(policy):
        if clause.open:
            errors.print(f"LEFT OPEN {clause.about}: {clause.text}", markup=False, soft_wrap=True)
    for told in missing:
        errors.print(f"NOT AT HAND {told}", markup=False, highlight=False, soft_wrap=True)


def _write_policy(text: str, out: Path | None) -> None:
    if out is None:
        say(text.rstrip())
        return
    write_public(out, text.encode())
    errors.print(f"{out} was written.", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Evidence of machines, verified except for its binding, and the data for verifying it."""

    evidence: Mapping[Path, Evidence]
    roots: Mapping[str, list[str]]
    """Root certificates by kind, for kinds whose roots a policy names. They come from the evidence
    itself, such as the certificate of a TPM's maker."""
    kept: Cache
    now: datetime

    def tables(self) -> dict[str, PolicyTable]:
        simulated, tpm = (frozenset(self.roots.get(kind, ())) for kind in ("simulated", "tpm"))
        trust = self.kept.trust_roots(simulated, tpm, self.now)
        workers = [describe_evidence(one, trust) for one in self.evidence.values()]
        return tables_from(workers, self.roots)

    def not_at_hand(self, policy: Policy) -> list[str]:
        """Returns what the policy needs from a verifier's cache and this cache lacks.

        Raises AttestationError if no policy can admit one of the machines.
        """
        trust = self.kept.trust(policy, self.now)
        found = []
        for path, one in self.evidence.items():
            try:
                rules = check_admits(policy, describe_evidence(one, trust))
            except AttestationError as problem:
                told = f"no policy can be written from {path}: {problem}"
                raise type(problem)(told, code=problem.code) from None
            found += [f"{rule.name}: {rule.found}; wanted: {rule.wanted}" for rule in rules]
        return list(dict.fromkeys(found))


def _read_evidence(paths: Sequence[Path], cache: Path | None, at: datetime | None) -> _Shown:
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


class _Prompter:
    """Asks the user, on stderr, because the policy is written to stdout."""

    def values(self, question: str, none: str = "none") -> list[str]:
        asked = f"{question} (several with spaces; empty: {none})"
        return str(typer.prompt(asked, default="", err=True)).split()

    def choice(self, question: str, known: Sequence[str]) -> str:
        """Asks for one of `known`. An empty answer means `any` if that is one of them."""
        default = "any" if "any" in known else None
        asked = f"{question} ({', '.join(known)})"
        answer = str(typer.prompt(asked, default=default, err=True))
        if answer not in known:
            raise ConfigurationError(f"{question} is one of {', '.join(known)}")
        return answer


def _ask() -> dict[str, PolicyTable]:
    prompter = _Prompter()
    kinds = [one for one in KINDS if one != "simulated"]
    return tables_asked(prompter.choice("Kind of evidence", kinds), prompter)


_DEVICES: Final = {
    "snp": "/dev/sev-guest",
    "tdx": "/dev/tdx_show_guest",
    "sgx": "/dev/sgx_enclave",
    "nvidia": "/dev/nvidiactl",
}


@app.command()
def attest(
    out: Annotated[
        Path | None,
        typer.Option(help="Write evidence there, made as SEALRING_ATTESTER says, to try a policy."),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="With --out: show the GPUs too.")] = False,
    ima: Annotated[
        bool,
        typer.Option("--ima", help="With --out: show the measured files too (IMA)."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the hardware here that signs evidence, and what it would show today.

    What is shown is what the hardware says of itself, for writing a policy: nothing of it was
    verified, and only verified evidence proves anything. With --out, evidence is written to a file,
    for `sealring policy check` and `sealring policy new`: made for a nonce of its own, so that no
    broker takes it.
    """
    if out is not None:
        _write_evidence(out, gpus, ima, json)
        return
    if gpus or ima:
        raise ConfigurationError("--gpus and --ima are for the evidence that --out writes")
    found = [_device_row(kind, device, Path(device).exists()) for kind, device in _DEVICES.items()]
    tpm = TPM.read(os.environ)
    found.append(_device_row("tpm", tpm, "://" in tpm or Path(tpm).exists()))
    for row in found:
        if row["present"]:
            row |= _show_device(row["kind"], row["device"])
    if json:
        print_json({"hardware": found, "simulated": "SIMULATED"})
        return
    table = Table(title="What this machine could prove")
    for column in ("kind", "device", "present", "sealring can judge it", "note"):
        table.add_column(column)
    for row in found:
        judged = "yes" if row["verifier"] else "not in this version"
        present = "yes" if row["present"] else "no"
        table.add_row(row["kind"], row["device"], present, judged, row["note"])
    console.print(table)
    for row in found:
        for name, value in row["shows"].items():
            console.print(f"{row['kind']} {name} = {value}", highlight=False, soft_wrap=True)


def _write_evidence(out: Path, gpus: bool, ima: bool, json: bool) -> None:
    attester = find_attester(os.environ, Wanted(gpus, ima))
    public_key = Ed25519PrivateKey.generate().public_key()
    key = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    extra = _credential(attester.introduce())
    content = attester.attest(secrets.token_bytes(NONCE_BYTES), key, extra).encode()
    write_public(out, content)
    shown = {"kind": attester.kind, "out": str(out), "bytes": len(content)}
    if json:
        print_json(shown)
        return
    say(f"{out}: {attester.kind} evidence, for a nonce of its own. No broker takes it; try it with")
    say(f"  sealring policy new --evidence {out}")
    say(f"  sealring policy check POLICY {out}")


def _credential(introduction: dict[str, Any]) -> dict[str, Any]:
    """The credential for a TPM's evidence, made here in the verifier's role. It proves nothing."""
    if not introduction:
        return {}
    certificate, ak = (
        base64.b64decode(one) for one in (introduction["chain"][0], introduction["ak"])
    )
    endorsement = load_certificate(certificate).public_key()
    blob = seal_credential(endorsement, parse_public(ak).name, secrets.token_bytes(32))
    return {"credential": base64.b64encode(blob).decode()}


def _device_row(kind: str, device: str, present: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "device": device,
        "present": present,
        "verifier": kind in {*KINDS, *DEVICE_KINDS},
        "note": "",
        "shows": {},
    }


def _show_device(kind: str, device: str) -> dict[str, Any]:
    questions: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "tpm": _show_tpm,
        "snp": _show_guest,
        "tdx": _show_guest,
    }
    if kind not in questions:
        return {}
    try:
        return questions[kind](device)
    except (AttestationError, AttestationUnavailable) as problem:
        return {"note": str(problem)}


def _show_tpm(address: str) -> dict[str, Any]:
    with Tpm.open(address) as tpm:
        bank = tpm.bank()
        values, size = tpm.read_pcrs(QUOTED, bank), BANKS[bank]
        shows = registers({pcr: values[size * n :][:size] for n, pcr in enumerate(QUOTED)})
        try:
            TpmMachine(tpm, ())
        except (AttestationError, AttestationUnavailable) as problem:
            # A TPM without a certificate of its maker proves nothing to others.
            return {"note": str(problem), "shows": shows}
    return {"note": "its maker certified it", "shows": shows}


def _show_guest(_: str) -> dict[str, Any]:
    answer = ask(bytes(64))
    return {"shows": {"measurement": _measurement(answer).hex()}}


def _measurement(answer: GuestAnswer) -> bytes:
    if answer.kind == TDX:
        body = 48 + (6 if answer.report[:1] == b"\x05" else 0)
        return answer.report[body + 136 : body + 184]  # MRTD
    return parse_report(answer.report).measurement
