"""The parsers of logs: notes, proofs, policies, submissions, tiles and statements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sealring.errors import (
    BadPolicy,
    ForgedStatement,
    LogError,
    MalformedStatement,
    TamperedLog,
)
from sealring.formats.log.checkpoints import (
    check_proof,
    open_checkpoint,
    parse_checkpoint,
    parse_proof,
    parse_submission,
)
from sealring.formats.log.notes import SignatureKind, Verifier, parse_note
from sealring.formats.log.policy import Log, LogPolicy, parse_policy
from sealring.formats.log.tree import decode_bundle, encode_bundle
from sealring.record.statements.signing import open_envelope, parse_statement

TRUSTED: Final = LogPolicy((Log(Verifier("example.com/log", SignatureKind.NOTE, bytes(32))),))


def log_checkpoint(data: bytes) -> None:
    with suppress(MalformedStatement):
        note = parse_note(data)
        assert note.encode() == data
        checkpoint = parse_checkpoint(note.text)
        assert checkpoint.encode() == note.text
    try:
        open_checkpoint(data, TRUSTED)
    except (MalformedStatement, ForgedStatement):
        return
    raise AssertionError("a checkpoint without the log's signature was believed")


def log_proof(data: bytes) -> None:
    try:
        proof = parse_proof(data)
    except MalformedStatement:
        return
    assert proof.encode() == data
    try:
        check_proof(proof, b"entry", TRUSTED)
    except LogError:
        return
    raise AssertionError("a proof without the log's signature was believed")


def log_policy(data: bytes) -> None:
    try:
        policy = parse_policy(data)
    except BadPolicy:
        return
    written = policy.encode().encode("utf-8", "surrogateescape")
    assert parse_policy(written) == policy
    assert policy.is_quorum([]) == (policy.quorum == "none")
    assert policy.is_quorum([witness.verifier for witness in policy.witnesses])


def log_submission(data: bytes) -> None:
    with suppress(MalformedStatement):
        assert parse_submission(data).encode() == data


def log_bundle(data: bytes) -> None:
    """The first byte is the number of entries that the file's name states."""
    if not data:
        return
    with suppress(TamperedLog):
        assert encode_bundle(decode_bundle(data[1:], data[0])) == data[1:]


def statement(data: bytes) -> None:
    with suppress(MalformedStatement, ForgedStatement):
        open_envelope(data, [])
        raise AssertionError("an envelope of no authority was believed")
    with suppress(MalformedStatement):
        subjects, _ = parse_statement(data)
        assert subjects


LOG_TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "log_checkpoint": log_checkpoint,
    "log_proof": log_proof,
    "log_policy": log_policy,
    "log_submission": log_submission,
    "log_bundle": log_bundle,
    "statement": statement,
}
