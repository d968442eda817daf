"""Policies (c2sp.org/tlog-policy): what counts as a quorum, and which texts are refused."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.errors import BadPolicy, ForgedStatement, LogError
from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.notes import Note, SignatureKind, Signer, Verifier, parse_note
from sealring.formats.log.policy import Log, Witness, byzantine_policy, parse_policy
from tests.codes import coded
from tests.record.statements.logs import ORIGIN, signed_note

LOG = Signer.generate(ORIGIN, SignatureKind.NOTE)
WITNESSES = [Signer.generate(f"witness.example/{n}", SignatureKind.COSIGNATURE) for n in range(7)]
VKEY = LOG.verifier.encode()
W = [witness.verifier.encode() for witness in WITNESSES]
KEYS = [witness.verifier for witness in WITNESSES]

NESTED = f"""
# the example of c2sp.org/tlog-policy
log {VKEY} https://log.example/

witness X1 {W[0]}
\twitness X2 {W[1]}   https://x2.example/\x20
witness X3 {W[2]}
group X-witnesses 2 X1 X2 X3
witness Y1 {W[3]}
witness Y2 {W[4]}
group Y-witnesses any Y1 Y2
group X-and-Y all X-witnesses Y-witnesses
quorum X-and-Y
"""


def test_the_example_of_the_specification() -> None:
    policy = parse_policy(NESTED.encode())
    assert policy.witnesses[1].url == "https://x2.example/"
    for cosigners, enough in (
        ([0, 1, 3], True), ([0, 2, 4], True), ([0, 1, 2, 3, 4], True),
        ([0, 3], False), ([0, 1, 2], False), ([3, 4], False), ([], False), ([5, 6], False),
    ):  # fmt: skip
        assert policy.is_quorum([KEYS[each] for each in cosigners]) is enough
    assert parse_policy(policy.encode().encode()) == policy


def test_two_thirds_of_the_witnesses_and_one() -> None:
    for count, needed in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 5)):
        witnesses = [Witness(f"w{n}", KEYS[n]) for n in range(count)]
        policy = byzantine_policy([Log(LOG.verifier)], witnesses)
        assert policy.groups[0].threshold == needed
        liars = (count - 1) // 3
        for few in combinations(KEYS[:count], needed - 1):
            assert not policy.is_quorum(few)
        for one in combinations(range(count), needed):
            assert policy.is_quorum([KEYS[each] for each in one])
            for other in combinations(range(count), needed):
                assert len(set(one) & set(other)) > liars


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no quorum line"),
        (f"log {VKEY}\n", "no quorum line"),
        ("quorum none\nquorum none\n", "line 2 is a second quorum"),
        ("quorum w\n", "no line before it defines"),
        (f"quorum w\nwitness w {W[0]}\n", "line 1 .*no line before"),
        ("log\nquorum none\n", "line 1 is not a log"),
        ("logs x\nquorum none\n", "is not a log"),
        ("log x\nquorum none\n", "has no key"),
        (f"log {VKEY} url more\nquorum none\n", "is not a log"),
        (f"log {W[0]}\nquorum none\n", "a log's is 0x01"),
        (f"witness w {VKEY}\nquorum none\n", "a witness's is 0x04"),
        (f"log {VKEY}\nlog {VKEY}\nquorum none\n", "second time"),
        (f"witness a {W[0]}\nwitness b {W[0]}\nquorum none\n", "would count twice"),
        (f"witness a {W[0]}\nwitness a {W[1]}\nquorum none\n", "second time"),
        (f"witness none {W[0]}\nquorum none\n", "second time"),
        (f"witness a {W[0]}\ngroup g 2 a\nquorum g\n", "asks for 2 of 1"),
        (f"witness a {W[0]}\ngroup g 0 a\nquorum g\n", "asks for 0 of 1"),
        (f"witness a {W[0]}\ngroup g -1 a\nquorum g\n", "asks for -1"),
        (f"witness a {W[0]}\ngroup g \u0661 a\nquorum g\n", "asks for"),
        ("group g any\nquorum g\n", "of 0 members"),
        ("group g all\nquorum g\n", "of 0 members"),
        ("group g any g\nquorum g\n", "no line before"),
        ("group g any none\nquorum g\n", "no line before"),
        (f"witness a {W[0]}\ngroup g any a a\nquorum g\n", "in a group already"),
        (f"witness a {W[0]}\ngroup g any a\ngroup h any a\nquorum g\n", "in a group already"),
        ("quorum none\r\n", "control character"),
        ("quorum\xa0none\n", "is not a log"),
        ("# x\n" * 5000 + "quorum none\n", "more than"),
    ],
)
@pytest.mark.threat("L22")
def test_what_is_not_a_policy(text: str, says: str) -> None:
    with pytest.raises(BadPolicy, match=says):
        parse_policy(text.encode())


@pytest.mark.threat("L4")
def test_a_witness_under_another_name_counts_once() -> None:
    renamed = Verifier("other.example", SignatureKind.COSIGNATURE, KEYS[0].public)
    with pytest.raises(BadPolicy, match="count twice"):
        parse_policy(f"witness a {W[0]}\nwitness b {renamed.encode()}\nquorum none\n".encode())


def cosigned(*times: int | None) -> bytes:
    note = parse_note(signed_note(LOG, [b"one"]))
    lines = [
        signer.sign(note.text, time)
        for signer, time in zip(WITNESSES, times, strict=False)
        if time is not None
    ]
    return Note(note.text, (*note.lines, *lines)).encode()


@pytest.mark.threat("L4")
def test_a_checkpoint_counts_with_a_quorum_and_an_old_one_does_not() -> None:
    policy = byzantine_policy([Log(LOG.verifier)], [Witness(f"w{n}", KEYS[n]) for n in range(4)])
    assert len(open_checkpoint(cosigned(100, 100, 100), policy).cosigned) == 3
    with pytest.raises(
        LogError,
        match=r"cosigned by: witness.example/0, witness.example/1$",
        check=coded("log.no_quorum"),
    ):
        open_checkpoint(cosigned(100, 100), policy)
    with pytest.raises(LogError, match="cosigned by: none", check=coded("log.no_quorum")):
        open_checkpoint(cosigned(), policy)
    # Cosignatures of witnesses outside the policy do not count.
    with pytest.raises(LogError, check=coded("log.no_quorum")):
        open_checkpoint(cosigned(100, 100, None, None, 100, 100), policy)
    assert open_checkpoint(cosigned(100, 200, 200, 200), policy, not_before=200).size == 1
    with pytest.raises(LogError, check=coded("log.stale_checkpoint")):
        open_checkpoint(cosigned(100, 199, 200, 200), policy, not_before=200)
    # One witness's signature is copied under another's name, and one witness signs twice.
    note = parse_note(cosigned(100, 100))
    line = note.lines[1]
    copied = type(line)(KEYS[2].name, KEYS[2].key_id, line.signature)
    with pytest.raises(
        ForgedStatement, match=r"witness\.example/2", check=coded("log.forged_note")
    ):
        open_checkpoint(Note(note.text, (*note.lines, copied)).encode(), policy)
    twice = Note(note.text, (*note.lines, WITNESSES[0].sign(note.text, 101)))
    with pytest.raises(LogError, check=coded("log.no_quorum")):
        open_checkpoint(twice.encode(), policy)


@given(st.binary(max_size=120))
def test_any_bytes_are_a_policy_or_a_bad_one(data: bytes) -> None:
    for candidate in (data, b"witness " + data + b"\nquorum none\n", b"quorum none\ngroup " + data):
        try:
            policy = parse_policy(candidate)
        except BadPolicy:
            continue
        assert policy.is_quorum([]) or policy.quorum != "none"
