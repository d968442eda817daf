"""`sealring policy`: what a policy says, and why evidence passes it or does not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sealring.cli.terminal import console, print_json
from sealring.errors import AttestationError, ConfigurationError
from sealring.identity.attestation import (
    Cache,
    Verdict,
    judge,
    parse_evidence,
    read_cache,
    verify_evidence,
)
from sealring.identity.attestation.cache import read_list
from sealring.identity.attestation.files import read_policy
from sealring.identity.private_files import read_public

app = typer.Typer(help="Judge evidence by a policy.", no_args_is_help=True)


@app.callback()
def policy() -> None:
    """Judge evidence by a policy."""


@app.command()
def check(
    policy: Annotated[Path, typer.Argument(help="The policy, a TOML file.")],
    evidence: Annotated[Path, typer.Argument(help="Evidence, as a worker sends it.")],
    nonce: Annotated[
        str | None, typer.Option(help="Insist on this nonce (hex), not on what the file says.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Judge it for this rank.")] = None,
    revocation_list: Annotated[
        list[Path] | None, typer.Option(help="A vendor's revocation list, DER or PEM.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of lists, collateral and references.")
    ] = None,
    at: Annotated[
        datetime | None, typer.Option(help="Judge all dates as of this time (UTC), not now.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say rule by rule why evidence passes a policy or does not. Exit status 1 if it does not."""
    rules, _ = read_policy(policy)
    shown: dict[str, Any] = {"admitted": False, "nonce": "given" if nonce else "as the file says"}
    try:
        sent = parse_evidence(read_public(evidence, "the evidence", ConfigurationError))
        now = at.replace(tzinfo=UTC) if at else datetime.now(UTC)
        kept = read_cache(cache, now) if cache else Cache()
        lists = tuple(read_list(path) for path in revocation_list or [])
        trust = replace(kept, lists=kept.lists + lists).trust(rules, now)
        shown |= {"at": now.isoformat(), "unusable_references": list(kept.expired)}
        own = sent.challenge
        challenge = replace(own, nonce=_nonce(nonce)) if nonce else own
        worker = verify_evidence(sent, challenge, trust)
    except AttestationError as error:
        shown |= {"error": type(error).__name__, "message": str(error), "rules": []}
        verdict = None
    else:
        verdict = judge(rules, worker, rank)
        shown |= {"admitted": verdict.admitted, "worker": worker.as_json()}
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
    if not shown["admitted"]:
        raise typer.Exit(1)


def _nonce(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigurationError("--nonce is hexadecimal") from None


def _print(shown: dict[str, Any], verdict: Verdict | None) -> None:
    if verdict is None:
        console.print(
            f"Refused before the policy was asked. {shown['error']}: {shown['message']}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    table = Table(title=f"{verdict.label}: {'admitted' if verdict.admitted else 'refused'}")
    for column in ("rule", "wanted", "found", ""):
        table.add_column(column)
    for rule in verdict.rules:
        outcome = Text(rule.refusal.__name__, "bold red") if rule.refusal else Text("ok", "green")
        table.add_row(rule.name, rule.wanted, Text(rule.found, overflow="fold"), outcome)
    console.print(table)
    for unusable in shown["unusable_references"]:
        console.print(f"Not used: {unusable}", markup=False, highlight=False, soft_wrap=True)
    if shown["nonce"] != "given":
        console.print("The nonce is the file's own: whether it is fresh was not judged (--nonce).")
    if verdict.label.startswith("tpm"):
        console.print("So is the TPM's credential: only the verifier that made it can judge it.")
