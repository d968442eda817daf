"""`sealring audit`: checks a finished run by its records, and makes and checks such records."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sealring.attest.evidence.cache import Cache, read_cache
from sealring.cli import audit_log
from sealring.cli.options import (
    AsJson,
    Authority,
    JobOfRun,
    Policy,
    require_believed,
    whom_to_believe,
)
from sealring.cli.terminal import console, errors, print_json, printable, say
from sealring.cli.vault_options import Key, opener_of
from sealring.errors import ConfigurationError
from sealring.formats.files import read_there
from sealring.formats.log.checkpoints import SignedCheckpoint, open_checkpoint
from sealring.formats.log.notes import MAX_NOTE_BYTES
from sealring.formats.log.policy import LogPolicy, read_policy
from sealring.record.audit.audit import AuditQuestion, AuditResult
from sealring.record.audit.audit import audit as audit_run
from sealring.record.audit.claims import RunClaims, read_claims
from sealring.record.audit.findings import Said
from sealring.record.audit.page import MAX_SHOWN, write_page
from sealring.record.audit.records import AuditTrust
from sealring.record.audit.spot_checks import Repetition
from sealring.record.papers import write_papers
from sealring.record.replay import Compare, Difference, Repeated
from sealring.record.statements.forms import CheckpointRef
from sealring.record.statements.run_folder import open_run
from sealring.record.statements.signing import read_owner, read_owner_key

app = typer.Typer(help="Check a finished run from its records.", no_args_is_help=True)
_COLOURS = {Said.YES: "green", Said.NO: "red", Said.NOT_SHOWN: "yellow"}

_SEED_DIGITS = 64


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: arguments of the run's script, for --replay."),
    ] = None,
    *,
    authority: Authority = None,
    job: JobOfRun = None,
    policy: Policy = None,
    claims: Annotated[
        Path | None, typer.Option(help="What is claimed of the run, a TOML file.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A file that should have come out of the run.")
    ] = None,
    owner: Annotated[
        list[Path] | None, typer.Option(help="The public key of one who signs stages or exports.")
    ] = None,
    seen: Annotated[
        list[Path] | None,
        typer.Option(help="A checkpoint of a log that was seen earlier or elsewhere."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of vendors' lists and references, for evidence.")
    ] = None,
    broker_log: Annotated[
        list[Path] | None,
        typer.Option(help="The log that the authority's broker published (`--log`): a folder."),
    ] = None,
    broker_policy: Annotated[
        Path | None, typer.Option(help="Of that log: its key, witnesses and quorum.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page that opens offline; replaced if there.")
    ] = None,
    replay: Annotated[
        int,
        typer.Option(
            min=0, help="Execute so many parts of the run again. It runs the run's own script!"
        ),
    ] = 0,
    replay_seconds: Annotated[
        float, typer.Option(min=1, help="The most that one part may take.")
    ] = 600.0,
    replay_tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="How far numbers may be from the recorded ones, as a share of the largest one of "
            "their tensor; 0: the same bits.",
        ),
    ] = 0.0,
    replay_vault: Annotated[
        Path | None,
        typer.Option(help="The copy of the vault that the script writes to, for a tolerance."),
    ] = None,
    replay_seed: Annotated[
        str | None, typer.Option(help="Repeat the parts of an earlier audit: its seed.")
    ] = None,
    key: Key = None,
    json: AsJson = False,
) -> None:
    """Check a finished run from its folder alone, and answer claims about it.

    Exit status 0: every claim is answered with yes, and nothing contradicts anything. 1: a claim is
    answered with no, or a record is forged or contradicted. 2: a claim is not shown, or something
    cannot be read.
    """
    logs = whom_to_believe(policy)
    brokers = read_policy(broker_policy) if broker_policy else None
    trust = AuditTrust(
        authorities=list(require_believed(authority).authorities),
        log=logs,
        owners=[read_owner(path) for path in owner or []],
        job=job,
        seen=[_seen(path, logs, brokers or LogPolicy(())) for path in seen or []],
        brokers=brokers,
        vendors=read_cache(cache, datetime.now(UTC)) if cache else Cache(),
    )
    if bool(broker_log) != bool(broker_policy):
        raise ConfigurationError("--broker-log and --broker-policy go together")
    strange = [name for name, value in (
        ("arguments of a script", arguments), ("--replay-tolerance", replay_tolerance),
        ("--replay-vault", replay_vault), ("--replay-seed", replay_seed),
    ) if value]  # fmt: skip
    if strange and not replay:
        raise ConfigurationError(f"{strange[0]}: for --replay, which is not given")
    repeated = None
    if replay:
        compare = compared_in(replay_vault, key, replay_tolerance, run, trust)
        repeated = Repetition(
            replay, arguments or (), replay_seconds, replay_tolerance, compare,
            seed_from(replay_seed),
        )  # fmt: skip
    question = AuditQuestion(
        read_claims(claims) if claims else RunClaims(), model, repeated, broker_log or ()
    )
    with errors.status("reading the run") as status:
        result = audit_run(run, trust, question, lambda part: status.update(f"checking {part}"))
    if html is not None:
        write_page(html, result)
    if json:
        print_json(result.as_json())
    else:
        _show(result)
        if html is not None:
            say(f"{html} is written; open it in a browser.")
    raise typer.Exit(result.status.value)


def _seen(path: Path, *believed: LogPolicy) -> SignedCheckpoint:
    content = read_there(path, MAX_NOTE_BYTES)
    # A quorum may not have cosigned it. The result says which witnesses did.
    logs = tuple(log for policy in believed for log in policy.logs)
    witnesses = tuple(witness for policy in believed for witness in policy.witnesses)
    return open_checkpoint(content, LogPolicy(logs, witnesses))


def _show(result: AuditResult) -> None:
    if result.answers:
        table = Table(title=Text(f"Claims about {printable(result.run)}"))
        for column in ("claim", "answer", "why, and where"):
            table.add_column(column)
        for answer in result.answers:
            said = Text(answer.said.value, style=f"bold {_COLOURS[answer.said]}")
            why = printable(answer.text) + _records(answer.records)
            table.add_row(answer.claim, said, Text(why))
        console.print(table)
    if result.findings:
        table = Table(title="Findings")
        for column in ("who", "what", "record", "contradicted by"):
            table.add_column(column)
        for finding in result.findings[:MAX_SHOWN]:
            table.add_row(
                Text(printable(" or ".join(finding.parties))),
                Text(f"{finding.fault.value}: {printable(finding.text)}"),
                Text(_some(finding.records)),
                Text(_some(finding.against)),
            )
        console.print(table)
        if (more := len(result.findings) - MAX_SHOWN) > 0:
            say(f"And {more} more findings: --json lists all.")
    log = "no believed log" if result.log is None else f"a log of {result.log.size} entries"
    job = printable(", ".join(result.jobs)) or "not shown"
    say(
        f"Run {printable(result.run)}, job {job}: {len(result.payloads)} statements of "
        f"{result.ranks} ranks over {result.intervals} intervals, {log}. {result.verdict}"
    )


def _records(digests: Sequence[str]) -> str:
    return f" [{_some(digests)}]" if digests else ""


def _some(digests: Sequence[str]) -> str:
    shown = " ".join(digest[:12] for digest in digests[:3])
    return f"{shown} and {len(digests) - 3} more" if len(digests) > 3 else shown


# ---- executing parts again


def seed_from(text: str | None) -> bytes:
    """The seed of an earlier audit, or a new random one."""
    if text is None:
        return secrets.token_bytes(_SEED_DIGITS // 2)
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(text) != _SEED_DIGITS or len(found) != _SEED_DIGITS // 2:
        raise ConfigurationError(
            f"--replay-seed has {_SEED_DIGITS} hexadecimal digits, as `audit --json` prints it"
        )
    return found


def compared_in(
    vault: Path | None, key: Path | None, tolerance: float, run: Path, trust: AuditTrust
) -> Compare | None:
    """Returns a function that compares a repetition's checkpoint with the recorded one.

    None if no tolerance is given: then only equal bits are accepted.
    """
    if not math.isfinite(tolerance):
        raise ConfigurationError("--replay-tolerance is a finite number, such as 1e-5")
    if vault is None:
        if tolerance:
            raise ConfigurationError(
                "a tolerance needs the checkpoints themselves: name the copy of the vault that the "
                "script writes to, --replay-vault DIR, and what opens it, --key FILE"
            )
        return None
    opener, job = opener_of(key, None, None), open_run(run).head.job

    def compare(recorded: CheckpointRef, repeated: Repeated) -> Difference:
        # Imported here, because it needs torch, which an audit does not need otherwise.
        from sealring.vault import Vault
        from sealring.vault.checkpoint_difference import NamedCheckpoint, largest_difference

        found = largest_difference(
            Vault.open(vault, opener),
            NamedCheckpoint(
                recorded.name, recorded.sha256, recorded.content, trust.authorities, job
            ),
            NamedCheckpoint(
                repeated.checkpoint.name,
                repeated.checkpoint.sha256,
                repeated.checkpoint.content,
                repeated.authorities,
                repeated.job,
            ),
        )
        return Difference(*found)

    return compare


# ---- a model's papers, and logs


@app.command()
def papers(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    model: Annotated[
        Path, typer.Argument(help="What `vault open --record RUN` wrote: a file, or a folder.")
    ],
    owner_key: Annotated[Path, typer.Option(help="The key that signed the export.")],
    model_key: Annotated[
        Path, typer.Option(help="An elliptic-curve key (PEM), for OpenSSF model signing.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder.")],
    authority: Authority = None,
    job: JobOfRun = None,
) -> None:
    """Write a model's signature, provenance, card and bill of materials, from a run's records."""
    trusted = require_believed(authority)
    written = write_papers(
        model, open_run(run), trusted.authorities, read_owner_key(owner_key), model_key, output,
        job,
    )  # fmt: skip
    for path in written:
        say(str(path))


for _command in (
    audit_log.init,
    audit_log.append,
    audit_log.proof,
    audit_log.verify,
    audit_log.policy,
    audit_log.witness,
):
    app.command()(_command)
app.command("log")(audit_log.verify_log)
