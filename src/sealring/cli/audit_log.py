"""The commands of `sealring audit` for logs, their witnesses, and single statements in logs.

A log in C2SP's formats cannot be rewritten unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509
from rich.logging import RichHandler

from sealring.cli.options import (
    AsJson,
    Authority,
    Policy,
    believed,
    parse_address,
    whom_to_believe,
)
from sealring.cli.terminal import errors, harmless, print_json, say
from sealring.errors import ConfigurationError
from sealring.formats.files import read_there, write_public
from sealring.formats.log import witnesses
from sealring.formats.log.checkpoints import (
    MAX_PROOF_BYTES,
    LogProof,
    SignedCheckpoint,
    check_proof,
    open_checkpoint,
    parse_proof,
)
from sealring.formats.log.folder import LogWriter, StoredTree, create_log, read_checkpoint
from sealring.formats.log.notes import MAX_NOTE_BYTES, SignatureKind, Signer, Verifier
from sealring.formats.log.policy import (
    NONE,
    Log,
    LogPolicy,
    Witness,
    byzantine_policy,
    read_policy,
)
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.record.statements.forms import Interval
from sealring.record.statements.signing import (
    VerifiedStatement,
    create_owner,
    read_owner,
    read_signer,
    verify_statement,
    write_key_pair,
)

_WAIT_SECONDS = 30.0

Folder = Annotated[Path, typer.Argument(help="The log's folder.")]
Key = Annotated[
    Path | None, typer.Option("--key", help="The log's signer key; LOG.key if not given.")
]
MaxAge = Annotated[
    float | None,
    typer.Option("--max-age", help="Seconds since a quorum cosigned; older is refused."),
]


def init(
    path: Annotated[Path, typer.Argument(help="The key's file, or with --log the log's folder.")],
    log: Annotated[
        str | None, typer.Option(help="Make a log of this name, e.g. example.com/runs/gpt.")
    ] = None,
    witness: Annotated[
        str | None, typer.Option(help="Make a witness's key of this name, e.g. example.com/w1.")
    ] = None,
    key: Key = None,
) -> None:
    """Make an owner's key, which signs what is made outside of a job; a log; or a witness's key.

    An owner's PATH.pub is for readers, and so are LOG.vkey and PATH.vkey of a log and a witness.
    """
    if log is None and witness is None:
        say(f"wrote {path} and {create_owner(path)}: give readers the latter")
        return
    if log is not None and witness is not None:
        raise ConfigurationError("pass --log or --witness, not both")
    signer = Signer.generate(
        log or witness or "", SignatureKind.COSIGNATURE if log is None else SignatureKind.NOTE
    )
    secret = path if log is None else _key_path(path, key)
    public = write_key_pair(secret, signer)
    if log is not None:
        create_log(path, signer)
    say(
        f"The key is {secret}: keep it apart. Policies and readers need the verifier key, {public}:"
    )
    say(signer.verifier.encode())


def policy(
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    log: Annotated[list[str], typer.Option(help="A log's verifier key.")],
    witness: Annotated[list[str], typer.Option(help="A witness: VKEY or VKEY,URL.")],
) -> None:
    """Write a policy in which a third of the witnesses may lie: a quorum of 2f + 1 of 3f + 1."""
    listed = []
    for number, each in enumerate(witness, 1):
        vkey, _, url = each.partition(",")
        listed.append(Witness(f"w{number}", Verifier.parse(vkey), url or None))
    made = byzantine_policy([Log(Verifier.parse(vkey)) for vkey in log], listed)
    write_public(output, made.encode().encode())
    group = made.groups[0]
    say(f"{output}: a quorum is {group.threshold} of {len(group.members)} witnesses.")


def append(
    log: Folder,
    files: Annotated[list[Path] | None, typer.Argument(help="One entry each.")] = None,
    lines: Annotated[
        Path | None, typer.Option(help="A file of which each line is an entry; - for stdin.")
    ] = None,
    authority: Authority = None,
    key: Key = None,
    cosigned_by: Annotated[
        Path | None, typer.Option(help="A policy whose witnesses cosign the checkpoint.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Append entries in one commit, and sign the new checkpoint.

    With --authority, each entry must be a statement of one of its workers: signature, certificate,
    and that it is valid today. With --cosigned-by the policy's witnesses cosign the checkpoint
    afterwards, also where nothing is appended; it fails without a quorum.
    """
    if not files and lines is None and cosigned_by is None:
        raise ConfigurationError("name the files to append, or --lines FILE, or --cosigned-by FILE")
    trust = None if cosigned_by is None else read_policy(cosigned_by)
    entries = _entries(files or [], lines)
    trusted = believed(authority)
    if trusted is not None:
        entries = _statements(entries, trusted.authorities, datetime.now(UTC))
    with _writer(log, key) as writer:
        numbers = writer.append(entries) if files or lines is not None else range(0)
        shown: dict[str, Any] = {"first": numbers.start, "count": len(numbers)} if numbers else {}
        signed = writer.checkpoint
        if trust is not None:
            signed = _cosign(writer, trust)
            shown["cosigned_by"] = signed.witnesses
    _show(signed, shown, json)


def _cosign(writer: LogWriter, trust: LogPolicy) -> SignedCheckpoint:
    before, stored = writer.checkpoint, writer.stored
    answers = witnesses.cosign(
        before, lambda old: stored.consistency_proof(old, before.root), trust
    )
    signed = writer.add_cosignatures(answers.cosignatures.values())
    for fault in answers.faults.values():
        errors.print(harmless(str(fault)), markup=False, highlight=False)
    return open_checkpoint(signed.note.encode(), trust)


def proof(
    log: Folder,
    index: Annotated[int, typer.Argument(help="The entry's number, from 0.")],
    policy: Policy = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; stdout if not given.")
    ] = None,
    entry: Annotated[
        Path | None, typer.Option(help="Write the entry itself to this file as well.")
    ] = None,
) -> None:
    """Write the one text file that proves an entry, offline."""
    signed = _opened(log, whom_to_believe(policy), None)
    stored = StoredTree(log, signed.size)
    hashes = stored.inclusion_proof(index, signed.root)
    made = LogProof(index, tuple(hashes), signed.note.encode()).encode()
    if entry is not None:
        write_public(entry, stored.entry(index, signed.root))
    if output is None:
        sys.stdout.buffer.write(made)
    else:
        write_public(output, made)


def verify_log(
    log: Folder,
    policy: Policy = None,
    seen: Annotated[
        list[Path] | None,
        typer.Option("--seen", help="A checkpoint seen earlier or elsewhere; it must be in it."),
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask the policy's witnesses whether it is the newest.")
    ] = False,
    max_age: MaxAge = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Write the checkpoint to this file, for a later --seen.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Read the whole log: every entry, every hash, the signatures, checkpoints seen earlier."""
    trust = whom_to_believe(policy)
    signed = _opened(log, trust, max_age)
    stored = StoredTree(log, signed.size)
    stored.check_all(signed.root)
    logs_alone = LogPolicy(trust.logs)  # a checkpoint seen earlier may lack cosignatures
    for path in seen or []:
        earlier = open_checkpoint(read_there(path, MAX_NOTE_BYTES), logs_alone)
        if earlier.checkpoint.origin != signed.checkpoint.origin:
            raise ConfigurationError(f"{path} is a checkpoint of another log")
        stored.check_contains(signed.root, earlier.checkpoint, str(path))
    if ask:
        witnesses.check_newest(
            signed, lambda old: stored.consistency_proof(old, signed.root), trust
        )
    if checkpoint is not None:
        write_public(checkpoint, signed.note.encode())
    _show(signed, {"cosigned_by": signed.witnesses}, json)


def verify(
    entry: Annotated[Path, typer.Argument(help="A signed statement, or any entry of a log.")],
    proof: Annotated[
        Path | None, typer.Option(help="What `sealring audit proof` wrote; a log's entry alone.")
    ] = None,
    policy: Policy = None,
    max_age: MaxAge = None,
    authority: Authority = None,
    owner: Annotated[Path | None, typer.Option(help="An owner's public key.")] = None,
    json: AsJson = False,
) -> None:
    """Check who signed a statement, or with --proof that a log has this entry.

    A statement's signature and certificate are checked as of the end of its interval.
    """
    trusted = believed(authority)
    if proof is not None:
        if trusted is not None or owner is not None:
            raise ConfigurationError(
                "--proof needs --policy alone: check the statement by another command"
            )
        found = parse_proof(read_there(proof, MAX_PROOF_BYTES))
        trust = whom_to_believe(policy)
        content = read_there(entry, MAX_ENTRY_BYTES)
        signed = check_proof(found, content, trust, _not_before(trust, max_age))
        cosigned = signed.witnesses
        _show(signed, {"index": found.index, "cosigned_by": cosigned}, json)
        return
    if policy is not None or max_age is not None:
        raise ConfigurationError("--policy and --max-age are for --proof, which is missing")
    if trusted is None and owner is None:
        raise ConfigurationError("whom do you believe? Pass --authority or --owner")
    statement = verify_statement(
        read_there(entry, MAX_ENTRY_BYTES),
        [] if trusted is None else trusted.authorities,
        owners=[] if owner is None else [read_owner(owner)],
    )
    _show_statement(statement, json)


def _show_statement(found: VerifiedStatement, json: bool) -> None:
    content, worker = found.content, found.worker
    if json:
        who = (
            {"owner": found.signer} if worker is None else {"job": worker.job, "rank": worker.rank}
        )
        kind = "interval" if isinstance(content, Interval) else "transformation"
        subjects = [asdict(one) for one in found.subjects]
        print_json({**who, "digest": found.digest, "subjects": subjects, kind: asdict(content)})
        return
    signer = f"the owner of key {found.signer}"
    if worker is not None:
        signer = f"rank {worker.rank} of {worker.job}"
    what = (
        f"steps {content.first_step} to {content.end_step}"
        if isinstance(content, Interval)
        else f"{content.kind} {_shown_name(content.name)}"
    )
    say(f"{signer}, {what}, vouches for:")
    for one in found.subjects:
        say(f"{one.sha256}  {_shown_name(one.name)}")


def _shown_name(name: str) -> str:
    """The name, safe for a terminal. The signer chose it, so it may contain control characters."""
    return name if name.isprintable() else repr(name)


def witness(
    key: Annotated[Path, typer.Option(help="Made by `sealring audit init --witness`.")],
    logs: Annotated[
        Path,
        typer.Option(help="The logs to witness: the log lines of a c2sp.org/tlog-policy file."),
    ],
    state: Annotated[
        Path, typer.Option(help="What was cosigned. Losing it breaks the witness's promise.")
    ] = Path("witness-state"),
    listen: Annotated[str, typer.Option(help="Where logs ask.")] = "127.0.0.1:8446",
) -> None:
    """Cosign checkpoints of logs, and never two that contradict each other, until stopped."""
    handler = RichHandler(console=errors, show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
    address = parse_address(listen)
    signer = read_signer(key)
    asyncio.run(_serve(signer, read_policy(logs), state, *address))


async def _serve(signer: Signer, policy: LogPolicy, folder: Path, host: str, port: int) -> None:
    from sealring.record.witness import (
        WitnessState,
        serving,  # its packages are an extra
    )

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with WitnessState(folder, signer, policy) as state:
        async with serving(state, host, port) as found:
            for origin, size in state.logs:
                errors.print(f"{origin}: {size} entries cosigned", highlight=False, markup=False)
            errors.print(f"{signer.name} answers at http://{host}:{found}", highlight=False)
            await stopped.wait()


def _opened(log: Path, policy: LogPolicy, max_age: float | None) -> SignedCheckpoint:
    return open_checkpoint(read_checkpoint(log), policy, _not_before(policy, max_age))


def _not_before(policy: LogPolicy, max_age: float | None) -> int:
    if max_age is None:
        return 0
    if policy.quorum == NONE:
        raise ConfigurationError(
            "--max-age counts from the witnesses' cosignatures, and no quorum of them is asked "
            "for: pass a --policy with one, or leave it out"
        )
    if not 0 <= max_age < math.inf:
        raise ConfigurationError(f"--max-age {max_age:g}: it is a number of seconds, from 0")
    return int(time.time() - max_age)


def _writer(log: Path, key: Path | None) -> LogWriter:
    path = _key_path(log, key)
    remembered = path.with_name(f"{path.name}.signed")
    return LogWriter(log, read_signer(path), remembered, wait=_WAIT_SECONDS)


def _key_path(log: Path, key: Path | None) -> Path:
    return key or log.resolve().with_name(f"{log.resolve().name}.key")


def _entries(files: Iterable[Path], lines: Path | None) -> Iterator[bytes]:
    for path in files:
        yield read_there(path, MAX_ENTRY_BYTES)
    if lines is None:
        return
    try:
        with sys.stdin.buffer if str(lines) == "-" else lines.open("rb") as file:
            # One byte more than an entry may have, so that a longer line is refused.
            while line := file.readline(MAX_ENTRY_BYTES + 2):
                yield line.removesuffix(b"\n")
    except OSError as problem:
        raise ConfigurationError(f"{lines} cannot be read: {problem.strerror}") from None


def _statements(
    entries: Iterable[bytes], authorities: Sequence[x509.Certificate], now: datetime
) -> Iterator[bytes]:
    for entry in entries:
        verify_statement(entry, authorities, now)
        yield entry


def _show(signed: SignedCheckpoint, more: dict[str, Any], json: bool) -> None:
    shown = {
        "origin": signed.checkpoint.origin,
        "size": signed.size,
        "root": signed.root.hex(),
        **more,
    }
    if json:
        print_json(shown)
    else:
        say("  ".join(f"{name} {value}" for name, value in shown.items()))
