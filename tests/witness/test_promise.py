"""A witness's promise, that it never cosigns two views: when it is killed, and when it is raced."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError, ForkedLog, LogError
from sealring.provenance.writer import write_signer
from sealring.witness.state import OtherSize, WitnessState
from tests.crashes import STEPS, killed_at
from tests.provenance.logs import numbered
from tests.witness.local import witness_key
from tests.witness.test_protocol import ENTRIES, KEY, POLICY, submission


def killed_in_an_answer(step: int, folder: Path, body: bytes) -> tuple[bool, bool]:
    """Whether a witness was killed at this step, and whether it had answered."""
    answered, answer = os.pipe()

    def serve() -> None:
        with WitnessState(folder, KEY, POLICY) as state:
            os.write(answer, state.add_checkpoint(body))

    killed = killed_at(step, serve, (*STEPS, "write"))
    os.close(answer)
    with open(answered, "rb") as pipe:
        return killed, bool(pipe.read())


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


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    write_signer(tmp_path / "key", witness_key())
    (tmp_path / "key").chmod(0o640)
    (tmp_path / "logs").write_text(POLICY.encode())
    done = CliRunner().invoke(
        app,
        [
            "witness", "--key", str(tmp_path / "key"), "--logs", str(tmp_path / "logs"),
            "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0",
        ],
    )  # fmt: skip
    assert isinstance(done.exception, ConfigurationError)
    assert "chmod 600" in str(done.exception)
    assert not (tmp_path / "state").exists()
