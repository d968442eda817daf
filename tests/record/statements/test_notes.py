"""Signed notes: the specification's own example, and notes that must be refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.errors import ForgedStatement, MalformedStatement
from sealring.formats.log.notes import (
    Note,
    SignatureKind,
    Signer,
    Verifier,
    parse_note,
    parse_signatures,
    verified,
    with_signatures,
)
from tests.codes import coded

# From c2sp.org/signed-note.
EXAMPLE_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
EXAMPLE = (
    "This is an example message.\n\n"
    "— example.com/foo "
    "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
).encode()
LOG = Signer.generate("example.com/log", SignatureKind.NOTE)
WITNESS = Signer.generate("witness.example/w1", SignatureKind.COSIGNATURE)
TEXT = "example.com/log\n0\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n"


def test_the_example_of_the_specification_verifies() -> None:
    key = Verifier.parse(EXAMPLE_KEY)
    assert key.encode() == EXAMPLE_KEY
    note = parse_note(EXAMPLE)
    assert note.encode() == EXAMPLE
    assert verified(note, [key]) == {key: 0}
    with pytest.raises(ForgedStatement, match=r"example\.com/foo", check=coded("log.forged_note")):
        verified(parse_note(EXAMPLE.replace(b"an example", b"no example")), [key])


def test_keys_survive_being_written_and_do_not_print_themselves() -> None:
    for signer in (LOG, WITNESS):
        read = Signer.parse(signer.encode())
        assert read.verifier == signer.verifier
        assert signer.encode() not in repr(signer)
        assert Verifier.parse(signer.verifier.encode()) == signer.verifier


def test_a_cosignature_is_over_its_time_and_under_a_key_of_its_own_kind() -> None:
    note = Note(TEXT, (LOG.sign(TEXT), WITNESS.sign(TEXT, 1679315147)))
    assert verified(note, [LOG.verifier, WITNESS.verifier]) == {
        LOG.verifier: 0,
        WITNESS.verifier: 1679315147,
    }
    line = note.lines[1]
    later = type(line)(line.name, line.key_id, b"\0" * 7 + b"\1" + line.signature[8:])
    with pytest.raises(ForgedStatement, match="w1", check=coded("log.forged_note")):
        verified(Note(TEXT, (later,)), [WITNESS.verifier])
    # As a log's key it has another id, so its cosignature does not count as a signature.
    as_log = Verifier(WITNESS.name, SignatureKind.NOTE, WITNESS.verifier.public)
    assert as_log.key_id != WITNESS.verifier.key_id
    assert verified(note, [as_log]) == {}


def test_unknown_keys_are_ignored_and_a_wrong_signature_of_a_known_one_is_not() -> None:
    other = Signer.generate(LOG.name, SignatureKind.NOTE)
    note = Note(TEXT, (other.sign(TEXT), LOG.sign(TEXT)))
    assert verified(note, [LOG.verifier]) == {LOG.verifier: 0}
    good = LOG.sign(TEXT)
    forged = type(good)(good.name, good.key_id, bytes(64))
    with pytest.raises(ForgedStatement, check=coded("log.forged_note")):
        verified(Note(TEXT, (good, forged)), [LOG.verifier])


def test_a_newer_signature_of_one_key_replaces_the_older_one() -> None:
    note = Note(TEXT, (LOG.sign(TEXT), WITNESS.sign(TEXT, 1)))
    newer = with_signatures(note, [WITNESS.sign(TEXT, 2)])
    assert verified(newer, [WITNESS.verifier]) == {WITNESS.verifier: 2}
    assert len(newer.lines) == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"text\n", "empty line"),
        (b"text\n\n", "newline"),
        (b"text\n\n- a AAAA\n", "em dash"),
        ("text\n\n— a\n".encode(), "a name and a signature"),
        ("text\n\n— a AAAA\n".encode(), "is cut"),
        ("text\n\n— a AAAAAAB=\n".encode(), "base64"),
        ("text\n\n— a AAAAAAAA".encode(), "newline"),
        ("text\n\n— a+b AAAAAAAA\n".encode(), "cannot name"),
        ("text\n\n—  AAAAAAAA\n".encode(), "cannot name"),
        ("text\r\n\n— a AAAAAAAA\n".encode(), "control"),
        (b"\xff\n\n", "UTF-8"),
        (b"x" * (1 << 18), "at most"),
        (("text\n\n" + "— a AAAAAAAA\n" * 65).encode(), "at most 64"),
    ],
)
@pytest.mark.threat("L22")
def test_what_is_not_a_note(data: bytes, says: str) -> None:
    with pytest.raises(MalformedStatement, match=says, check=coded("log.malformed_note")):
        parse_note(data)


@pytest.mark.parametrize(
    "key",
    [
        "", "a+b", "a+530d903a+", EXAMPLE_KEY.replace("530d903a", "530d903b"),
        EXAMPLE_KEY.replace("530d903a", "530D903A"), EXAMPLE_KEY + "A",
        EXAMPLE_KEY.replace("example.com", "example com"),
        EXAMPLE_KEY.replace("+Aeky", "+Beky"), "PRIVATE+KEY+" + EXAMPLE_KEY,
    ],
)  # fmt: skip
@pytest.mark.threat("L22")
def test_what_is_not_a_verifier_key(key: str) -> None:
    with pytest.raises(MalformedStatement, check=coded("log.malformed_note")):
        Verifier.parse(key)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_note_or_a_malformed_one(data: bytes) -> None:
    for candidate in (data, b"text\n\n\xe2\x80\x94 " + data + b"\n"):
        try:
            note = parse_note(candidate)
        except MalformedStatement:
            continue
        assert note.encode() == candidate
        assert parse_signatures("".join(line.encode() for line in note.lines)) == note.lines


def test_an_error_about_a_signer_key_quotes_nothing_of_it() -> None:
    whole = Signer.generate("example.com/log", SignatureKind.NOTE).encode()
    name, number, key = whole.removeprefix("PRIVATE+KEY+").split("+", 2)
    for parts in ((key,), (name, key), (key, number), (name, number, key[:-4]), (key, number, key)):
        broken = "+".join(("PRIVATE+KEY", *parts))
        with pytest.raises(
            MalformedStatement,
            match=r"is not a|another key's id",
            check=coded("log.malformed_note"),
        ) as raised:
            Signer.parse(broken)
        assert key[:12] not in str(raised.value)
