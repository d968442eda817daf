"""`sealring policy`: what a policy says, and why evidence passes it or does not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sealring.attest.evidence import (
    Cache,
    Policy,
    Verdict,
    describe_evidence,
    judge,
    parse_evidence,
    read_cache,
    verify_evidence,
)
from sealring.attest.evidence.cache import read_list
from sealring.attest.evidence.files import read_policy
from sealring.attest.evidence.policy_words import explain
from sealring.cli import policy_make
from sealring.cli.terminal import console, print_json, say
from sealring.errors import AttestationError, ConfigurationError
from sealring.formats.files import read_public

app = typer.Typer(help="Judge evidence by a policy, and write policies.", no_args_is_help=True)
app.command("new")(policy_make.new)
app.command("upgrade")(policy_make.upgrade)


@app.callback()
def policy() -> None:
    """Judge evidence by a policy, and write policies."""


@app.command()
def check(
    policy: Annotated[Path, typer.Argument(help="The policy, a TOML file.")],
    evidence: Annotated[
        Path | None, typer.Argument(help="Evidence, as a worker sends it or `attest --out` writes.")
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
    cache: Annotated[
        Path | None, typer.Option(help="Folder of lists, OCSP answers, collateral and references.")
    ] = None,
    at: Annotated[
        datetime | None, typer.Option(help="Judge all dates as of this time (UTC), not now.")
    ] = None,
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
        shown |= {"error": type(error).__name__, "message": str(error), "rules": []}
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
                "error": rule.refusal.__name__ if rule.refusal else None,
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
        if shown["error"] == "NotBound":
            say("--without-binding judges everything else.")
        return
    passed = "refused"
    if verdict.admitted:
        passed = "admitted" if shown["admitted"] else "passes, but is not admitted like this"
    table = Table(title=f"{verdict.label}: {passed}")
    for column in ("rule", "wanted", "found", ""):
        table.add_column(column)
    for rule in verdict.rules:
        outcome = Text(rule.refusal.__name__, "bold red") if rule.refusal else Text("ok", "green")
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
