"""Each status code that c2sp.org/tlog-witness names, and hostile requests."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sealring.errors import ConfigurationError, LogError, TamperedLog
from sealring.formats.log.checkpoints import Checkpoint, Submission
from sealring.formats.log.notes import (
    Note,
    SignatureKind,
    Signer,
    parse_note,
    parse_signatures,
    verified,
)
from sealring.formats.log.policy import Log, LogPolicy
from sealring.record.witness import LIMITS, WitnessState
from tests.codes import coded
from tests.record.statements import slow
from tests.record.statements.logs import ORIGIN, numbered, signed_note
from tests.record.witness.local import answering, request, witness_key

LOG = Signer.generate(ORIGIN, SignatureKind.NOTE)
OTHER_LOG = Signer.generate("example.com/other", SignatureKind.NOTE)
KEY = witness_key()
POLICY = LogPolicy((Log(LOG.verifier), Log(OTHER_LOG.verifier)))
ENTRIES = numbered(40)


def submission(old: int, size: int, entries: list[bytes] = ENTRIES, signer: Signer = LOG) -> bytes:
    proof = slow.proof(old, entries[:size]) if 0 < old <= size else []
    return Submission(old, tuple(proof), signed_note(signer, entries[:size])).encode()


@dataclass
class Served:
    port: int
    folder: Path

    def post(self, body: bytes) -> tuple[int, bytes, str | None]:
        return request(self.port, "POST", "/add-checkpoint", body)

    def status(self, body: bytes) -> int:
        return self.post(body)[0]

    def seen(self, origin: str = ORIGIN) -> tuple[int, bytes, str | None]:
        digest = hashlib.sha256(origin.encode()).hexdigest()
        return request(self.port, "GET", f"/{digest}/checkpoint")


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "state"
    with WitnessState(folder, KEY, POLICY) as state, answering(state) as port:
        yield Served(port, folder)


def test_it_cosigns_what_continues_and_shows_what_it_has_seen(witness: Served) -> None:
    assert witness.seen()[0] == 404
    for old, size in ((0, 3), (3, 3), (3, 8), (8, 40)):
        before = int(time.time())
        status, body, _ = witness.post(submission(old, size))
        assert status == 200
        (line,) = parse_signatures(body.decode())
        text = parse_note(signed_note(LOG, ENTRIES[:size])).text
        assert KEY.verifier.signed(line)
        assert before <= KEY.verifier.check(text, line) <= time.time()
    status, body, _ = witness.seen()
    assert status == 200
    shown = parse_note(body)
    assert shown.text == Checkpoint(ORIGIN, 40, slow.mth(ENTRIES)).encode()
    assert set(verified(shown, [LOG.verifier, KEY.verifier])) == {LOG.verifier, KEY.verifier}
    # Each log has a state of its own.
    assert witness.seen("example.com/other")[0] == 404
    assert witness.status(submission(0, 5, signer=OTHER_LOG)) == 200


@pytest.mark.threat("L10")
def test_404_for_an_unknown_log(witness: Served) -> None:
    stranger = Signer.generate("example.com/stranger", SignatureKind.NOTE)
    assert witness.status(submission(0, 3, signer=stranger)) == 404


@pytest.mark.threat("L10")
def test_403_without_a_valid_signature_of_the_log(witness: Served) -> None:
    impostor = Signer.generate(ORIGIN, SignatureKind.NOTE)
    assert witness.status(submission(0, 3, signer=impostor)) == 403
    # One log's key cannot sign for another log, even under that log's name.
    renamed = Signer(ORIGIN, SignatureKind.NOTE, OTHER_LOG.key)
    assert witness.status(submission(0, 3, signer=renamed)) == 403
    honest = parse_note(signed_note(LOG, ENTRIES[:3]))
    line = honest.lines[0]
    forged = type(line)(line.name, line.key_id, bytes(64))
    for lines in ((forged,), (line, forged)):
        note = Note(honest.text, lines).encode()
        assert witness.status(Submission(0, (), note).encode()) == 403
    assert witness.seen()[0] == 404


def test_400_for_an_old_size_that_is_larger(witness: Served) -> None:
    assert witness.status(submission(4, 3)) == 400


def test_409_with_the_size_that_it_has(witness: Served) -> None:
    assert witness.status(submission(0, 8)) == 200
    for old, size in ((0, 8), (7, 8), (0, 40), (3, 40), (9, 40), (0, 0), (3, 5)):
        assert witness.post(submission(old, size)) == (409, b"8\n", "text/x.tlog.size")
    # A log that the witness has not seen has size 0.
    other = submission(3, 5, signer=OTHER_LOG)
    assert witness.post(other) == (409, b"0\n", "text/x.tlog.size")


@pytest.mark.threat("L6")
def test_422_for_what_does_not_continue(witness: Served) -> None:
    rewritten = [b"rewritten", *ENTRIES[1:]]
    note = signed_note(LOG, ENTRIES[:3])
    # A proof that is not needed here, and an empty tree with a root of its own.
    assert witness.status(Submission(0, (bytes(32),), note).encode()) == 422
    text = Checkpoint(ORIGIN, 0, bytes(32)).encode()
    empty = Note(text, (LOG.sign(text),)).encode()
    assert witness.status(Submission(0, (), empty).encode()) == 422
    assert witness.status(submission(0, 8)) == 200
    assert witness.status(submission(8, 40, rewritten)) == 422
    assert witness.status(submission(8, 8, rewritten)) == 422
    honest = signed_note(LOG, ENTRIES)
    for proof in ((), (bytes(32),), tuple(slow.proof(7, ENTRIES))):
        assert witness.status(Submission(8, proof, honest).encode()) == 422
    assert (
        witness.status(Submission(8, (bytes(32),), signed_note(LOG, ENTRIES[:8])).encode()) == 422
    )
    # Both roots for eight entries are kept, as proof of the fork.
    (kept,) = witness.folder.glob("*.refused")
    assert kept.read_bytes() == signed_note(LOG, rewritten[:8])
    assert witness.status(submission(8, 40)) == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\n", b"old 0\n", b"old 00\n\n", b"old -1\n\n", b"new 0\n\n",
        b"old 0\n\n" + b"x" * 100, b"\xff" * 50, b"old 0\n\nexample.com/log\n0\n\n",
        b"old 0\n" + b"AAAA\n" * 64 + b"\n", b"old 99999999999999999999\n\n",
        submission(0, 3).replace(b"\n3\n", b"\n03\n"), submission(0, 3)[:-1],
        submission(0, 3).replace(b"old 0\n", b"old 0\n\n"),
    ],
)  # fmt: skip
@pytest.mark.threat("L10")
def test_400_for_what_is_no_submission(witness: Served, body: bytes) -> None:
    assert witness.status(body) == 400
    assert witness.status(submission(0, 3)) == 200


@pytest.mark.threat("L10")
def test_other_paths_methods_and_too_much(witness: Served) -> None:
    assert request(witness.port, "GET", "/add-checkpoint")[0] == 405
    assert request(witness.port, "POST", "/sign-subtree", b"")[0] == 404
    assert request(witness.port, "GET", "/../../etc/passwd")[0] == 404
    assert request(witness.port, "GET", "/" + "0" * 64 + "/checkpoint")[0] == 404
    assert witness.status(b"x" * (LIMITS.body_bytes + 1)) == 413
    with socket.create_connection(("127.0.0.1", witness.port), 30) as noise:
        noise.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in noise.recv(4096)
    assert witness.status(submission(0, 3)) == 200


@pytest.mark.threat("L10")
def test_slow_and_greedy_clients(tmp_path: Path) -> None:
    limits = replace(
        LIMITS, request_seconds=0.3, idle_seconds=0.3, requests_per_second=0.0, burst=3
    )
    with WitnessState(tmp_path, KEY, POLICY) as state, answering(state, limits) as port:
        with socket.create_connection(("127.0.0.1", port), 30) as slow_client:
            slow_client.sendall(b"POST /add-checkpoint HTTP/1.1\r\nhost: x\r\n")
            assert b" 408 " in slow_client.recv(4096)
        with socket.create_connection(("127.0.0.1", port), 30) as silent:
            assert silent.recv(4096) == b""
        found = [request(port, "POST", "/add-checkpoint", submission(0, 3))[0] for _ in range(4)]
        assert found == [200, 409, 409, 429]


@pytest.mark.threat("L9")
def test_the_state_is_on_the_disk_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WitnessState(tmp_path, KEY, POLICY) as state:
        state.add_checkpoint(submission(0, 3))

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, answering(state) as port:
            patched.setattr("sealring.formats.files.os.fsync", full)
            assert request(port, "POST", "/add-checkpoint", submission(3, 8))[0] == 500
        # It was not cosigned, so it is not remembered.
        assert list(state.logs) == [("example.com/log", 3), ("example.com/other", 0)]
    with WitnessState(tmp_path, KEY, POLICY) as state:
        assert list(state.logs) == [("example.com/log", 3), ("example.com/other", 0)]
        state.add_checkpoint(submission(3, 8))
    with WitnessState(tmp_path, KEY, POLICY) as state:
        assert next(state.logs) == ("example.com/log", 8)


@pytest.mark.threat("L9")
def test_two_witnesses_do_not_share_a_state(tmp_path: Path) -> None:
    with (
        WitnessState(tmp_path, KEY, POLICY),
        pytest.raises(LogError, check=coded("log.in_use")),
        WitnessState(tmp_path, KEY, POLICY),
    ):
        pass


@pytest.mark.threat("L9")
def test_a_state_that_another_wrote_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / hashlib.sha256(ORIGIN.encode()).hexdigest()
    stranger = witness_key(2)
    with WitnessState(tmp_path, stranger, POLICY) as state:
        state.add_checkpoint(submission(0, 3))
    others = path.read_bytes()
    for content in (others, signed_note(LOG, ENTRIES[:3]), b"", others[:-9]):
        path.write_bytes(content)
        with pytest.raises(TamperedLog, match="not what this witness wrote"):
            WitnessState(tmp_path, KEY, POLICY).__enter__()


def test_a_logs_key_and_an_empty_list_of_logs_make_no_witness(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a log's"):
        WitnessState(tmp_path, LOG, POLICY)
    with pytest.raises(ConfigurationError, match="no log"):
        WitnessState(tmp_path, KEY, LogPolicy(()))
