"""Four witnesses, of which one is killed and one lies. A quorum still counts."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import (
    ConfigurationError,
    ForkedLog,
    LogError,
)
from sealring.formats.log import witnesses
from sealring.formats.log.checkpoints import SignedCheckpoint, Submission, open_checkpoint
from sealring.formats.log.folder import StoredTree
from sealring.formats.log.notes import Note
from sealring.formats.log.policy import LogPolicy
from sealring.record.statements.signing import write_signer
from tests.codes import coded
from tests.record.statements import slow
from tests.record.statements.logs import LocalLog, new_log, numbered, signed_note
from tests.record.witness.local import (
    LocalWitness,
    WitnessProcess,
    WitnessThread,
    liar,
    policy_of,
    request,
    signs_anything,
)


@dataclass
class Scene:
    log: LocalLog
    running: list[LocalWitness]
    policy: LogPolicy

    def cosign(self, seconds: float = 20.0) -> witnesses.Answers:
        signed, stored = self.log.opened(), self.log.tree()
        return witnesses.cosign(
            signed, lambda old: stored.consistency_proof(old, signed.root), self.policy, seconds
        )

    def counted(self, answers: witnesses.Answers) -> SignedCheckpoint:
        with self.log.writer() as writer:
            signed = writer.add_cosignatures(answers.cosignatures.values())
        return open_checkpoint(signed.note.encode(), self.policy)

    def check_newest(self) -> witnesses.Answers:
        signed, stored = self.log.opened(), self.log.tree()
        return witnesses.check_newest(
            signed, lambda old: stored.consistency_proof(old, signed.root), self.policy
        )


@contextmanager
def four(folder: Path, kind: type[LocalWitness]) -> Iterator[Scene]:
    log = new_log(folder, numbered(10))
    running = [kind(folder / f"w{n}", n, log.policy) for n in (1, 2, 3, 4)]
    with ExitStack() as stack:
        for each in running:
            stack.callback(each.kill)
            each.start()
        for each in running:
            each.wait_until_it_answers()
        yield Scene(log, running, policy_of(log.signer, [each.listed for each in running]))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with four(tmp_path, WitnessThread) as found:
        yield found


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Scene]:
    with four(tmp_path, WitnessProcess) as found:
        yield found


@contextmanager
def replaced(scene: Scene, number: int, answer: Any) -> Iterator[None]:
    """Kill the witness of this number, and have a liar answer with its key at its port."""
    witness = scene.running[number - 1]
    witness.kill()
    with liar(witness.port, answer(witness.signer)):
        yield


def garbage(signer: Any) -> Any:
    return lambda method, path, body: (200, b"\xe2\x80\x94 nonsense \xff\n")


@pytest.mark.threat("L8")
def test_one_is_killed_one_lies_and_a_quorum_counts(processes: Scene) -> None:
    scene = processes
    answers = scene.cosign()
    assert sorted(answers.cosignatures) == ["w1", "w2", "w3", "w4"]
    assert scene.counted(answers).size == 10
    # One is killed, and three of four answer.
    scene.running[3].kill()
    scene.log.append(numbered(290, 10))
    answers = scene.cosign()
    assert sorted(answers.cosignatures) == ["w1", "w2", "w3"]
    assert answers.faults["w4"].code == "log.witness_fault"
    assert "w4 cannot be asked" in str(answers.faults["w4"])
    assert scene.counted(answers).size == 300
    # It starts again with what it remembered, and another one answers garbage.
    scene.running[3].start()
    scene.running[3].wait_until_it_answers()
    scene.log.append(numbered(1, 300))
    with replaced(scene, 2, garbage):
        answers = scene.cosign()
        assert sorted(answers.cosignatures) == ["w1", "w3", "w4"]
        assert "w2 answers wrongly" in str(answers.faults["w2"])
        assert scene.counted(answers).size == 301
        # With a second one down, too few are left.
        scene.running[0].kill()
        scene.log.append([b"unseen"])
        answers = scene.cosign()
        assert sorted(answers.cosignatures) == ["w3", "w4"]
        with pytest.raises(
            LogError,
            match=r"cosigned by: witness\.example/3, witness\.example/4$",
            check=coded("log.no_quorum"),
        ):
            scene.counted(answers)
        with pytest.raises(
            LogError, match=r"too few witnesses say.*w1.*w2", check=coded("log.no_quorum")
        ):
            scene.check_newest()


def submit(scene: Scene, number: int, old: int, history: list[bytes]) -> tuple[int, bytes]:
    """Send what an owner would that shows each witness a different history."""
    proof = tuple(slow.proof(old, history)) if old else ()
    body = Submission(old, proof, signed_note(scene.log.signer, history)).encode()
    return request(scene.running[number - 1].port, "POST", "/add-checkpoint", body)[:2]


def cosigned(scene: Scene, history: list[bytes], lines: list[bytes]) -> bytes:
    return signed_note(scene.log.signer, history) + b"".join(lines)


@pytest.mark.threat("L6")
def test_a_split_view_needs_more_liars_than_the_quorum_allows(scene: Scene) -> None:
    one, other = [*numbered(10), b"one"], [*numbered(10), b"other"]
    with replaced(scene, 4, signs_anything):
        # The owner shows `one` to the first, `other` to the second and third, and both to the liar.
        first = [submit(scene, number, 0, one) for number in (1, 4)]
        second = [submit(scene, number, 0, other) for number in (2, 3, 4)]
        assert {status for status, _ in first + second} == {200}
        counted = open_checkpoint(cosigned(scene, other, [b for _, b in second]), scene.policy)
        assert counted.size == 11
        with pytest.raises(LogError, check=coded("log.no_quorum")):
            open_checkpoint(cosigned(scene, one, [b for _, b in first]), scene.policy)
        # The honest witnesses keep to what they cosigned.
        assert submit(scene, 2, 11, one)[0] == 422
        assert submit(scene, 3, 11, [*one, b"more"])[0] == 422
        # With two liars of four, both views have a quorum. This limit is documented.
        with replaced(scene, 3, signs_anything):
            first += [submit(scene, 3, 0, one)]
            both = open_checkpoint(cosigned(scene, one, [b for _, b in first]), scene.policy)
            assert both.root != counted.root


@pytest.mark.threat("L5")
def test_a_log_that_was_cut_or_rewritten_since_it_was_cosigned(
    scene: Scene, tmp_path: Path
) -> None:
    scene.counted(scene.cosign())
    shutil.copytree(scene.log.folder, tmp_path / "old")
    scene.log.append(numbered(5, 10))
    scene.counted(scene.cosign())
    assert len(scene.check_newest().cosignatures) == 4
    # The log is replaced by an older copy, which is complete and cosigned by all.
    shutil.rmtree(scene.log.folder)
    shutil.copytree(tmp_path / "old", scene.log.folder)
    assert scene.log.check() == 10
    with pytest.raises(
        ForkedLog,
        match=r"ends at 10 entries, and the witness w\d holds .* 15",
        check=coded("log.truncated_log"),
    ):
        scene.check_newest()
    with pytest.raises(ForkedLog, check=coded("log.truncated_log")):
        scene.cosign()
    # The log is rewritten after that point, and is longer than before.
    scene.log.remembered.unlink()
    scene.log.append([b"rewritten", *numbered(20)])
    assert scene.log.check() == 31
    with pytest.raises(ForkedLog, match=r"witness w\d holds a checkpoint of 15"):
        scene.check_newest()
    with pytest.raises(ForkedLog, match="15"):
        scene.cosign()
    assert StoredTree(scene.log.folder, 31).size == 31


@pytest.mark.threat("L8")
def test_liars_about_sizes_and_signatures_are_faults_and_no_proof(scene: Scene) -> None:
    def too_large(signer: Any) -> Any:
        return lambda method, path, body: (409, b"999\n") if method == "POST" else (404, b"")

    def older(signer: Any) -> Any:
        old = signed_note(scene.log.signer, numbered(2))
        line = signer.sign(old.decode().partition("\n\n")[0] + "\n", 1).encode().encode()
        return lambda method, path, body: (200, line)

    def never_the_same(signer: Any) -> Any:
        sizes = iter(range(1, 9))
        return lambda method, path, body: (409, b"%d\n" % next(sizes))

    def forged(signer: Any) -> Any:
        note = signed_note(scene.log.signer, numbered(11)).replace(b"\n11\n", b"\n12\n")
        return lambda method, path, body: (422, b"") if method == "POST" else (200, note)

    for lie, says in (
        (too_large, "w1 says that it has seen 999 entries, and does not show it"),
        (older, "w1 answers wrongly: the signature of witness"),
        (never_the_same, "another size"),
        (forged, "w1 answers wrongly"),
        (lambda signer: lambda *_: (200, b"x" * (1 << 18)), "without an end"),
        (lambda signer: lambda *_: (302, b""), "status 302"),
    ):
        with replaced(scene, 1, lie):
            answers = scene.cosign()
            assert sorted(answers.cosignatures) == ["w2", "w3", "w4"]
            assert says in str(answers.faults["w1"])


@pytest.mark.threat("L8")
def test_a_witness_that_answers_after_the_deadline(scene: Scene) -> None:
    waited = threading.Event()

    def late(signer: Any) -> Any:
        def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            waited.wait(60)
            return signs_anything(signer)(method, path, body)

        return answer

    with replaced(scene, 1, late):
        try:
            answers = scene.cosign(seconds=2.0)
            assert sorted(answers.cosignatures) == ["w2", "w3", "w4"]
            assert answers.faults["w1"].code == "log.witness_fault"
        finally:
            waited.set()


@pytest.mark.threat("L7")
def test_a_network_that_answers_for_the_witnesses(scene: Scene) -> None:
    """The network can replay every earlier answer, and has no key."""
    scene.counted(scene.cosign())
    text = scene.log.opened().note.text
    hour_ago = int(time.time()) - 3600

    def replays(signer: Any) -> Any:
        line = signer.sign(text, hour_ago).encode().encode()
        return lambda method, path, body: (200, line) if method == "POST" else (404, b"")

    with ExitStack() as stack:
        for number in (1, 2):
            stack.enter_context(replaced(scene, number, replays))
        with pytest.raises(
            LogError, match="w1 answered with an old cosignature", check=coded("log.no_quorum")
        ):
            scene.check_newest()
        for number in (3, 4):
            stack.enter_context(replaced(scene, number, lambda signer: lambda *_: (404, b"")))
        with pytest.raises(
            LogError, match="w3 answered with status 404", check=coded("log.no_quorum")
        ):
            scene.check_newest()


@pytest.mark.threat("L7")
def test_asking_no_witness_shows_nothing(scene: Scene) -> None:
    signed, stored = scene.log.opened(), scene.log.tree()
    for policy in (scene.log.policy, LogPolicy(scene.policy.logs, scene.policy.witnesses)):
        with pytest.raises(ConfigurationError, match="no quorum"):
            witnesses.check_newest(
                signed, lambda old: stored.consistency_proof(old, signed.root), policy
            )


def test_as_it_is_typed(scene: Scene, tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        done = CliRunner().invoke(app, ["audit", *map(str, arguments), "--json"])
        if done.exception is not None:
            raise done.exception
        return json.loads(done.stdout)

    key = tmp_path / "log.key"
    write_signer(key, scene.log.signer)
    policy = tmp_path / "policy"
    listed = [
        f"--witness={each.listed.verifier.encode()},{each.listed.url}" for each in scene.running
    ]
    made = CliRunner().invoke(
        app,
        ["audit", "policy", str(policy), f"--log={scene.log.signer.verifier.encode()}", *listed],
    )
    assert "3 of 4" in made.stdout
    with pytest.raises(LogError, check=coded("log.no_quorum")):
        run("log", scene.log.folder, "--policy", policy)
    names = [each.signer.name for each in scene.running]
    assert run("append", scene.log.folder, "--cosigned-by", policy)["cosigned_by"] == names
    found = run("log", scene.log.folder, "--policy", policy, "--ask", "--max-age", 600)
    assert found["cosigned_by"] == names
    note = scene.log.opened().note
    shown = Note(note.text, (note.lines[0], *(w.signer.sign(note.text, 9) for w in scene.running)))
    (scene.log.folder / "checkpoint").write_bytes(shown.encode())
    assert run("log", scene.log.folder, "--policy", policy)["size"] == 10
    with pytest.raises(LogError, check=coded("log.stale_checkpoint")):
        run("log", scene.log.folder, "--policy", policy, "--max-age", 600)
