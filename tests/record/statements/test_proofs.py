"""A proof in one text file (c2sp.org/tlog-proof), checked offline and for one entry only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.errors import ForgedStatement, MalformedStatement, TamperedLog
from sealring.formats.log.checkpoints import LogProof, check_proof, parse_proof
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from tests.codes import coded
from tests.record.statements import slow
from tests.record.statements.logs import ORIGIN, new_log, numbered, signed_note

SIGNER = Signer.generate(ORIGIN, SignatureKind.NOTE)
POLICY = LogPolicy((Log(SIGNER.verifier),))


def proof_of(index: int, size: int, extra: bytes | None = None) -> bytes:
    entries = numbered(size)
    hashes = tuple(slow.path(index, entries))
    return LogProof(index, hashes, signed_note(SIGNER, entries), extra).encode()


@pytest.mark.threat("L3")
def test_a_proof_passes_for_its_entry_and_no_other() -> None:
    data = proof_of(3, 7, b"context")
    proof = parse_proof(data)
    assert proof.encode() == data
    assert proof.extra == b"context"
    assert check_proof(proof, b"entry 3", POLICY).size == 7
    for entry in (b"entry 4", b"", b"entry 3\n"):
        with pytest.raises(TamperedLog, match="number 3 of 7", check=coded("log.not_included")):
            check_proof(proof, entry, POLICY)
    moved = parse_proof(data.replace(b"index 3", b"index 4"))
    with pytest.raises(TamperedLog, check=coded("log.not_included")):
        check_proof(moved, b"entry 3", POLICY)
    other = Signer.generate("example.com/other", SignatureKind.NOTE)
    with pytest.raises(ForgedStatement, check=coded("log.wrong")):
        check_proof(proof, b"entry 3", LogPolicy((Log(other.verifier),)))
    with pytest.raises(ForgedStatement, check=coded("log.forged_note")):
        check_proof(parse_proof(data.replace(b"\n7\n", b"\n8\n")), b"entry 3", POLICY)


def test_a_log_of_one_entry_needs_no_hashes() -> None:
    data = proof_of(0, 1)
    assert data.startswith(b"c2sp.org/tlog-proof@v1\nindex 0\n\nexample.com/log\n1\n")
    assert check_proof(parse_proof(data), b"entry 0", POLICY).size == 1


@pytest.mark.threat("L3")
def test_an_inner_node_is_not_taken_for_an_entry() -> None:
    # RFC 6962 hashes leaves and nodes differently, so two children cannot pass as one entry.
    entries = numbered(2)
    children = b"".join(slow.mth([entry]) for entry in entries)
    proof = LogProof(0, (), signed_note(SIGNER, [children]))
    assert slow.mth([children]) != slow.mth(entries)
    with pytest.raises(TamperedLog, check=coded("log.not_included")):
        check_proof(LogProof(0, (), signed_note(SIGNER, entries)), children, POLICY)
    assert check_proof(proof, children, POLICY).size == 1


def test_a_proof_of_a_log_on_disk(tmp_path: Path) -> None:
    log = new_log(tmp_path, numbered(300))
    hashes = log.tree().inclusion_proof(299, log.opened().root)
    proof = LogProof(299, tuple(hashes), (log.folder / "checkpoint").read_bytes())
    assert check_proof(parse_proof(proof.encode()), b"entry 299", log.policy).size == 300


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[10:], "begins with"),
        (lambda data: data.replace(b"@v1", b"@v2"), "begins with"),
        (lambda data: data.replace(b"index 3\n", b""), "index line"),
        (lambda data: data.replace(b"index 3", b"index 03"), "not a number"),
        (lambda data: data.replace(b"index 3", b"index -3"), "not a number"),
        (lambda data: data.replace(b"index 3", b"index 9223372036854775808"), "not a number"),
        (lambda data: data.replace(b"index 3", "index \u0663".encode()), "ASCII"),
        (lambda data: data.replace(b"index 3\n", b"index 3\nAAAA\n"), "32 bytes"),
        (lambda data: data.replace(b"index 3\n", b"index 3\n!\n"), "not base64"),
        (lambda data: data.replace(b"index 3\n", b"index 3\n" + b"AAAA\n" * 64), "at most 63"),
        (lambda data: data.replace(b"index", b"extra !\nindex"), "not base64"),
        (lambda data: data + bytes(1 << 19), "at most"),
    ],
)
@pytest.mark.threat("L22")
def test_what_is_not_a_proof(change: object, says: str) -> None:
    assert callable(change)
    with pytest.raises(MalformedStatement, match=says, check=coded("log.malformed_note")):
        parse_proof(change(proof_of(3, 7)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_proof_or_a_malformed_one(data: bytes) -> None:
    for candidate in (data, b"c2sp.org/tlog-proof@v1\n" + data + b"\n\n"):
        try:
            proof = parse_proof(candidate)
        except MalformedStatement:
            continue
        assert proof.encode() == candidate
