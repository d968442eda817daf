"""`sealring log`: a log on disk that cannot be rewritten unnoticed, in C2SP's formats."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509

from sealring.cli.authorities import SecretFile, believed
from sealring.cli.terminal import errors, harmless, print_json, say
from sealring.errors import ConfigurationError, MalformedNote
from sealring.formats.files import read_limited, write_public
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
from sealring.formats.log.notes import MAX_NOTE_BYTES, Kind, Signer, Verifier
from sealring.formats.log.policy import (
    NONE,
    Log,
    LogPolicy,
    Witness,
    byzantine_policy,
    read_policy,
)
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.record.provenance.owners import read_signer, write_key_pair
from sealring.record.provenance.statements import verify_statement

app = typer.Typer(help="Keep a log that cannot be rewritten unnoticed.", no_args_is_help=True)

_WAIT_SECONDS = 30.0

Folder = Annotated[Path, typer.Argument(help="The log's folder.")]
Key = Annotated[
    Path | None, typer.Option("--key", help="The log's signer key; LOG.key if not given.")
]
Vkey = Annotated[
    str | None, typer.Option("--vkey", help="The log's verifier key, where no witness is asked.")
]
Policy = Annotated[
    Path | None, typer.Option("--policy", help="Logs, witnesses and quorum (c2sp.org/tlog-policy).")
]
MaxAge = Annotated[
    float | None,
    typer.Option("--max-age", help="Seconds since a quorum cosigned; older is refused."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs to read.")]


@app.command()
def init(
    log: Folder,
    origin: Annotated[
        str, typer.Option(help="The log's name for ever, e.g. example.com/runs/gpt.")
    ],
    key: Key = None,
) -> None:
    """Make an empty log and its keys; print the verifier key that readers need.

    LOG.key is the signer key, and LOG.vkey the verifier key.
    """
    signer = Signer.generate(origin, Kind.NOTE)
    path = _key_path(log, key)
    public = write_key_pair(path, signer)
    create_log(log, signer)
    say(f"The key is {path}: keep it apart from the log. Readers need this verifier key, {public}:")
    say(signer.verifier.encode())


@app.command("policy")
def make_policy(
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    log: Annotated[list[str], typer.Option(help="A log's verifier key.")],
    witness: Annotated[list[str], typer.Option(help="A witness: VKEY or VKEY,URL.")],
) -> None:
    """Write a policy in which a third of the witnesses may lie: a quorum of 2f + 1 of 3f + 1."""
    listed = []
    for number, each in enumerate(witness, 1):
        vkey, _, url = each.partition(",")
        listed.append(Witness(f"w{number}", Verifier.parse(vkey), url or None))
    policy = byzantine_policy([Log(Verifier.parse(vkey)) for vkey in log], listed)
    write_public(output, policy.encode().encode())
    group = policy.groups[0]
    say(f"{output}: a quorum is {group.threshold} of {len(group.members)} witnesses.")


@app.command()
def append(
    log: Folder,
    files: Annotated[list[Path] | None, typer.Argument(help="One entry each.")] = None,
    lines: Annotated[
        Path | None, typer.Option(help="A file of which each line is an entry; - for stdin.")
    ] = None,
    statements_of: Annotated[
        Path | None,
        typer.Option(help="An authority: each entry is a statement of one of its workers."),
    ] = None,
    secret_file: SecretFile = None,
    key: Key = None,
    json: AsJson = False,
) -> None:
    """Append entries in one commit, and sign the new checkpoint.

    With --statements-of or --secret-file, entries are checked first: signature, certificate, and
    that it is valid today.
    """
    if not files and lines is None:
        raise ConfigurationError("name the files to append, or --lines FILE")
    entries = _entries(files or [], lines)
    trusted = believed([] if statements_of is None else [statements_of], secret_file)
    if trusted is not None:
        entries = _statements(entries, trusted.authorities, datetime.now(UTC))
    with _writer(log, key) as writer:
        numbers = writer.append(entries)
        _show(writer.checkpoint, {"first": numbers.start, "count": len(numbers)}, json)


@app.command()
def checkpoint(
    log: Folder, policy: Policy = None, vkey: Vkey = None, max_age: MaxAge = None,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Print the log's checkpoint, once its signatures pass the policy."""
    signed = _opened(log, whom_to_believe(policy, vkey), max_age)
    if json:
        _show(signed, {}, json)
    else:
        sys.stdout.buffer.write(signed.note.encode())  # signed bytes, whatever the encoding


@app.command()
def cosign(log: Folder, policy: Policy = None, key: Key = None, json: AsJson = False) -> None:
    """Have the policy's witnesses cosign the checkpoint; fails without a quorum."""
    if policy is None:
        raise ConfigurationError("say which witnesses to ask: --policy FILE")
    trust = read_policy(policy)
    with _writer(log, key) as writer:
        before = writer.checkpoint
        stored = writer.stored
        answers = witnesses.cosign(
            before, lambda old: stored.consistency_proof(old, before.root), trust
        )
        signed = writer.add_cosignatures(answers.cosignatures.values())
    for fault in answers.faults.values():
        errors.print(harmless(str(fault)), markup=False, highlight=False)
    opened = open_checkpoint(signed.note.encode(), trust)
    _show(opened, {"cosigned_by": sorted(key.name for key in opened.cosigned)}, json)


@app.command()
def proof(
    log: Folder,
    index: Annotated[int, typer.Argument(help="The entry's number, from 0.")],
    policy: Policy = None,
    vkey: Vkey = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; stdout if not given.")
    ] = None,
) -> None:
    """Write the one text file that proves an entry, offline."""
    signed = _opened(log, whom_to_believe(policy, vkey), None)
    hashes = StoredTree(log, signed.size).inclusion_proof(index, signed.root)
    made = LogProof(index, tuple(hashes), signed.note.encode()).encode()
    if output is None:
        sys.stdout.buffer.write(made)
    else:
        write_public(output, made)


@app.command()
def entry(
    log: Folder,
    index: Annotated[int, typer.Argument(help="The entry's number, from 0.")],
    policy: Policy = None,
    vkey: Vkey = None,
) -> None:
    """Write an entry to stdout, once it is proved to be in the log."""
    signed = _opened(log, whom_to_believe(policy, vkey), None)
    sys.stdout.buffer.write(StoredTree(log, signed.size).entry(index, signed.root))


@app.command()
def verify(
    log: Folder,
    policy: Policy = None,
    vkey: Vkey = None,
    seen: Annotated[
        list[Path] | None,
        typer.Option("--seen", help="A checkpoint seen earlier or elsewhere; it must be in it."),
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask the policy's witnesses whether it is the newest.")
    ] = False,
    max_age: MaxAge = None,
    json: AsJson = False,
) -> None:
    """Read the whole log: every entry, every hash, the signatures, checkpoints seen earlier."""
    trust = whom_to_believe(policy, vkey)
    signed = _opened(log, trust, max_age)
    stored = StoredTree(log, signed.size)
    stored.check_all(signed.root)
    logs_alone = LogPolicy(trust.logs)  # what was seen may not have been cosigned yet
    for path in seen or []:
        earlier = open_checkpoint(_read(path, MAX_NOTE_BYTES), logs_alone)
        if earlier.checkpoint.origin != signed.checkpoint.origin:
            raise ConfigurationError(f"{path} is a checkpoint of another log")
        stored.check_contains(signed.root, earlier.checkpoint, str(path))
    if ask:
        witnesses.check_newest(
            signed, lambda old: stored.consistency_proof(old, signed.root), trust
        )
    _show(signed, {"cosigned_by": sorted(key.name for key in signed.cosigned)}, json)


@app.command("verify-proof")
def verify_proof(
    proof: Annotated[Path, typer.Argument(help="What `sealring log proof` wrote.")],
    entry: Annotated[Path, typer.Argument(help="The entry that it is to prove.")],
    policy: Policy = None,
    vkey: Vkey = None,
    max_age: MaxAge = None,
    json: AsJson = False,
) -> None:
    """Check that an entry is in a log, with nothing but the proof and the policy."""
    found = parse_proof(_read(proof, MAX_PROOF_BYTES))
    content = _read(entry, MAX_ENTRY_BYTES)
    trust = whom_to_believe(policy, vkey)
    signed = check_proof(found, content, trust, _not_before(trust, max_age))
    cosigned = sorted(key.name for key in signed.cosigned)
    _show(signed, {"index": found.index, "cosigned_by": cosigned}, json)


def whom_to_believe(policy: Path | None, vkey: str | None) -> LogPolicy:
    """The policy of `--policy`, or one of the key of `--vkey` alone."""
    if (policy is None) == (vkey is None):
        raise ConfigurationError("say whom to believe: --policy FILE, or --vkey KEY")
    if policy is not None:
        return read_policy(policy)
    if "+" not in str(vkey) and Path(str(vkey)).is_file():
        raise ConfigurationError(f'--vkey is the key itself: --vkey "$(cat {vkey})"')
    verifier = Verifier.parse(str(vkey))
    if verifier.kind is not Kind.NOTE:
        raise MalformedNote(f"the verifier key of {verifier.name} is a witness's, not a log's")
    return LogPolicy((Log(verifier),))


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
        yield _read(path, MAX_ENTRY_BYTES)
    if lines is None:
        return
    try:
        with sys.stdin.buffer if str(lines) == "-" else lines.open("rb") as file:
            # One byte more than an entry may have, so that a longer line is seen as one.
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


def _read(path: Path, limit: int) -> bytes:
    content = read_limited(path, limit)
    if content is None:
        raise ConfigurationError(f"there is no file {path}")
    return content


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
