"""The first corpus entries for the parsers of logs."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.formats.log.checkpoints import LogProof, Submission
from sealring.formats.log.notes import Note, SignatureKind, Signer, parse_note
from sealring.formats.log.tree import encode_bundle
from tests.record.statements import slow
from tests.record.statements.logs import ORIGIN, numbered, signed_note
from tests.record.statements.test_notes import EXAMPLE
from tests.record.statements.test_policy import NESTED
from tests.record.statements.test_statements import signed

LOG = Signer(ORIGIN, SignatureKind.NOTE, Ed25519PrivateKey.from_private_bytes(bytes(32)))
WITNESS = Signer(
    "w.example", SignatureKind.COSIGNATURE, Ed25519PrivateKey.from_private_bytes(bytes(32))
)
ENTRIES = numbered(7)


def checkpoints() -> Iterator[tuple[str, bytes]]:
    note = parse_note(signed_note(LOG, ENTRIES))
    yield "signed", note.encode()
    cosigned = (*note.lines, WITNESS.sign(note.text, 1679315147))
    yield "cosigned", Note(note.text, cosigned).encode()
    extended = note.text + "extension\n"
    yield "extended", Note(extended, (LOG.sign(extended),)).encode()
    yield "empty-log", signed_note(LOG, [])
    yield "no-checkpoint", EXAMPLE


def proofs() -> Iterator[tuple[str, bytes]]:
    note = signed_note(LOG, ENTRIES)
    yield "third", LogProof(3, tuple(slow.path(3, ENTRIES)), note).encode()
    yield "extra", LogProof(6, tuple(slow.path(6, ENTRIES)), note, b"extra").encode()
    yield "one-entry", LogProof(0, (), signed_note(LOG, ENTRIES[:1])).encode()


def policies() -> Iterator[tuple[str, bytes]]:
    yield "nested", NESTED.encode()
    yield "no-witness", f"log {LOG.verifier.encode()}\nquorum none\n".encode()
    yield (
        "opaque-names",
        f"witness \xff {WITNESS.verifier.encode()}\nquorum \xff\n".encode("latin-1"),
    )


def submissions() -> Iterator[tuple[str, bytes]]:
    note = signed_note(LOG, ENTRIES)
    yield "first", Submission(0, (), note).encode()
    yield "next", Submission(3, tuple(slow.proof(3, ENTRIES)), note).encode()


def bundles() -> Iterator[tuple[str, bytes]]:
    yield "seven", b"\x07" + encode_bundle(ENTRIES)
    yield "empty-entries", b"\x02" + encode_bundle([b"", b""])
    yield "long", b"\x01" + encode_bundle([b"x" * 300])


def statements() -> Iterator[tuple[str, bytes]]:
    envelope = signed()
    yield "envelope", envelope
    yield "payload", base64.b64decode(json.loads(envelope)["payload"])


LOG_CORPUS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "log_checkpoint": checkpoints,
    "log_proof": proofs,
    "log_policy": policies,
    "log_submission": submissions,
    "log_bundle": bundles,
    "statement": statements,
}
