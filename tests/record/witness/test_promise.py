"""A witness promises never to cosign two views. Here it is killed and raced."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError, DiskFull, ForkedLog, LogError, MalformedStatement
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import Checkpoint, Submission
from sealring.formats.log.notes import MAX_NOTE_BYTES, MAX_SIGNATURES, Note, parse_signatures
from sealring.record.statements.signing import write_signer
from sealring.record.witness import OtherSize, WitnessState
from tests.codes import coded
from tests.crashes import STEPS, killed_at
from tests.record.statements.logs import numbered
from tests.record.witness.local import witness_key
from tests.record.witness.test_protocol import ENTRIES, KEY, LOG, POLICY, submission


def killed_in_an_answer(step: int, folder: Path, body: bytes) -> tuple[bool, bool]:
    """Return whether a witness was killed at this step, and whether it had answered."""
    answered, answer = os.pipe()

    def serve() -> None:
        with WitnessState(folder, KEY, POLICY) as state:
            os.write(answer, state.add_checkpoint(body))

    killed = killed_at(step, serve, (*STEPS, "write"))
    os.close(answer)
    with open(answered, "rb") as pipe:
        return killed, bool(pipe.read())


@pytest.mark.threat("L9")
def test_killed_at_every_step_it_remembers_what_it_answered(tmp_path: Path) -> None:
    size, step = 3, 0
    with WitnessState(tmp_path, KEY, POLICY) as state:
        state.add_checkpoint(submission(0, size))
    remembered_unanswered = 0
    while True:
        step += 1
        killed, answered = killed_in_an_answer(step, tmp_path, submission(size, size + 1))
        with WitnessState(tmp_path, KEY, POLICY) as state:
            (_, found), _ = state.logs
            assert found in (size, size + 1)
            assert found == size + 1 or not answered
            remembered_unanswered += found == size + 1 and not answered
            rewritten = [b"rewritten", *ENTRIES[1:]]
            with pytest.raises(ForkedLog):
                state.add_checkpoint(submission(found, found, rewritten))
        if not killed:
            break
        size = found
    assert answered
    assert step > 4
    assert remembered_unanswered > 0


@pytest.mark.threat("L9")
def test_of_two_views_at_the_same_time_one_is_cosigned(tmp_path: Path) -> None:
    count = 8
    together = threading.Barrier(count)
    views = [[b"view %d" % number, *numbered(9)] for number in range(count)]

    with WitnessState(tmp_path, KEY, POLICY) as state, ThreadPoolExecutor(count) as threads:

        def race(view: list[bytes]) -> type[LogError] | None:
            together.wait(30)
            try:
                state.add_checkpoint(submission(0, 10, view))
            except LogError as refusal:
                return type(refusal)
            return None

        outcomes = list(threads.map(race, views))
    assert outcomes.count(None) == 1
    assert outcomes.count(OtherSize) == count - 1


@pytest.mark.threat("L9")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    write_signer(tmp_path / "key", witness_key())
    (tmp_path / "key").chmod(0o640)
    (tmp_path / "logs").write_text(POLICY.encode())
    done = CliRunner().invoke(
        app,
        [
            "audit", "witness", "--key", str(tmp_path / "key"), "--logs", str(tmp_path / "logs"),
            "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0",
        ],
    )  # fmt: skip
    assert isinstance(done.exception, ConfigurationError)
    assert "chmod 600" in str(done.exception)
    assert not (tmp_path / "state").exists()


def first(extension: str = "", copies: int = 1) -> tuple[str, bytes]:
    """Return a log's first checkpoint, with its signature repeated."""
    root = tree.leaf_hash(ENTRIES[0])
    text = Checkpoint(LOG.name, 1, root, (extension,) if extension else ()).encode()
    return text, Submission(0, (), Note(text, (LOG.sign(text),) * copies).encode()).encode()


@pytest.mark.threat("L11")
def test_a_signature_that_is_sent_many_times_is_kept_once(tmp_path: Path) -> None:
    """Anyone on the network can send a log's checkpoint in this form."""
    _, body = first(copies=MAX_SIGNATURES)
    with WitnessState(tmp_path, KEY, POLICY) as state:
        state.add_checkpoint(body)
    with WitnessState(tmp_path, KEY, POLICY) as state:
        assert dict(state.logs)[LOG.name] == 1


@pytest.mark.threat("L11")
def test_a_checkpoint_too_large_to_be_cosigned_does_not_end_the_witness(tmp_path: Path) -> None:
    text, _ = first("x")
    room = MAX_NOTE_BYTES - len(Note(text, (LOG.sign(text),)).encode())
    _, body = first("x" * room)
    with (
        WitnessState(tmp_path, KEY, POLICY) as state,
        pytest.raises(
            MalformedStatement, match="at most 131072 bytes", check=coded("log.malformed_note")
        ),
    ):
        state.add_checkpoint(body)
    with WitnessState(tmp_path, KEY, POLICY) as state:
        assert dict(state.logs)[LOG.name] == 0
        state.add_checkpoint(submission(0, 3))


@pytest.mark.threat("L11")
def test_a_clock_that_goes_back_takes_no_cosignature_back(tmp_path: Path) -> None:
    text, body = first()
    again = Submission(1, (), Note(text, (LOG.sign(text),)).encode()).encode()
    times = []
    for number, now in enumerate((1000.0, 400.0, -5.0, 1001.0)):
        with WitnessState(tmp_path, KEY, POLICY, lambda now=now: now) as state:
            (line,) = parse_signatures(state.add_checkpoint(again if number else body).decode())
        times.append(KEY.verifier.check(text, line))
    assert times == [1000, 1000, 1000, 1001]


@pytest.mark.threat("L11")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with WitnessState(tmp_path, KEY, POLICY) as state:
        state.add_checkpoint(submission(0, 3))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for _ in range(3):
                with pytest.raises(DiskFull, match="cannot be written: No space left"):
                    state.add_checkpoint(submission(3, 4))
        assert list((tmp_path / ".new").iterdir()) == []
        assert dict(state.logs)[LOG.name] == 3
        state.add_checkpoint(submission(3, 4))
