"""Chains of statements that verify, and accounts in which both ends of a link agree."""

from __future__ import annotations

import itertools
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cryptography import x509

import sealring
from sealring.core.identity import load_credentials
from sealring.errors import ConfigurationError, MalformedRun
from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import StoredTree, create_log, read_checkpoint
from sealring.formats.log.notes import SignatureKind, Signer, Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.record import note_checkpoint_in, note_checkpoint_out, note_data
from sealring.record.recording import noted
from sealring.record.recording.run import note_opened
from sealring.record.statements.forms import (
    Interval,
    LinkAccount,
    Named,
    Share,
    Transformation,
    parameters_of,
)
from sealring.record.statements.run_folder import RunFolder, open_run
from sealring.record.statements.signing import sign_statement, verify_statement
from tests.workers import SECRET, Workers

WORLD = 3
NOW = int(time.time())


def train(rank: int, world: int, folder: str, steps: int) -> None:
    tensor = torch.ones(3000)
    settings = {"steps": steps, "lr": 0.1}
    with sealring.record_run(
        folder, every=2, configuration=settings, rank=rank, world=world
    ) as records:
        pair = dist.new_group([0, 1])
        for step in records.steps(steps):
            dist.all_reduce(tensor)
            share = Share(world, rank, 1)
            note_data("corpus", "aa" * 32, 0, step * world, (step + 1) * world, seed=7, share=share)
            if rank == 0:
                dist.send(tensor, 1)
            if rank == 1:
                dist.recv(tensor.clone(), 0)
            if step == 2:
                note_checkpoint_out("model@1", "bb" * 32, "cc" * 32)
        if rank < 2:
            dist.barrier(group=pair)
        if rank == 2:
            records.note_privacy("gaussian", 1.5, 1e-5, noise=1.1)


@pytest.fixture(scope="module")
def authorities() -> tuple[x509.Certificate, ...]:
    return load_credentials(0, WORLD, {"SEALRING_SECRET": SECRET}).authorities


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> Path:
    folder = tmp_path_factory.mktemp("recording") / "run"
    fresh = {"SEALRING_TEST": "recording"}  # so the group is a new one, whose counts start at zero
    workers.run(train, str(folder), 5, world=WORLD, env=fresh)
    return folder


def chains(folder: Path, authorities: Any) -> list[list[tuple[str, Interval]]]:
    """Return each rank's (digest, interval) pairs, in the order of their sequence numbers."""
    found: list[list[tuple[str, Interval]]] = [[] for _ in range(WORLD)]
    for _, envelope in open_run(folder).statements():
        statement = verify_statement(envelope, authorities)
        assert isinstance(statement.content, Interval)
        assert statement.worker is not None
        found[statement.worker.rank].append((statement.digest, statement.content))
    return found


def test_each_rank_signs_a_chain_from_the_first_step_to_the_last(
    run: Path, authorities: Any
) -> None:
    for chain in chains(run, authorities):
        intervals = [interval for _, interval in chain]
        assert [(one.first_step, one.end_step) for one in intervals] == [(0, 2), (2, 4), (4, 5)]
        assert [one.sequence for one in intervals] == [0, 1, 2]
        assert [one.final for one in intervals] == [False, False, True]
        for (before, _), (_, after) in itertools.pairwise(chain):
            assert after.previous == before
        assert len({one.run for one in intervals}) == 1


def test_both_ends_of_every_link_agree_at_every_interval(run: Path, authorities: Any) -> None:
    compared = 0
    for sequence in range(3):
        ends: dict[Any, LinkAccount] = {}
        for rank, chain in enumerate(chains(run, authorities)):
            # A worker may still hold earlier tests' groups, and by the last statement it does not.
            own = {(g.name, g.epoch) for g in chain[-1][1].groups}
            for link in chain[sequence][1].links:
                if (link.group, link.epoch) in own:
                    ends[link.group, link.epoch, link.kind, rank, link.peer] = link
        for (group, epoch, kind, rank, peer), link in ends.items():
            other = ends[group, epoch, kind, peer, rank]
            assert link.sent is not None
            assert link.sent.records + (link.received.records if link.received else 0) > 0
            assert (link.sent, link.received) == (other.received, other.sent)
            compared += 1
    assert compared >= 3 * 6


def test_counts_groups_data_and_checkpoints_are_those_of_the_run(
    run: Path, authorities: Any
) -> None:
    zero, one, two = ([interval for _, interval in chain] for chain in chains(run, authorities))
    counts = {(each.group, each.kind): each.count for each in zero[-1].collectives}
    assert counts[zero[-1].groups[0].name, "all_reduce"] == 5
    assert [group.members for group in zero[-1].groups] == [[0, 1, 2], [0, 1]]
    assert [group.members for group in two[-1].groups] == [[0, 1, 2]]
    assert {link.kind for link in one[-1].links} == {"collective", "message"}
    read = [[part for part in interval.data if part.name == "corpus"] for interval in two]
    assert [(part.first, part.end) for part in read[0]] == [(0, 6)]
    assert [(part.first, part.end) for part in read[-1]] == [(12, 15)]
    assert read[0][0].share == Share(WORLD, 2, 1)
    assert [each.step for each in zero[1].checkpoints_out] == [3]
    assert (zero[-1].privacy, two[-1].privacy and two[-1].privacy.epsilon) == (None, "1.5")
    folder = open_run(run)
    assert folder.evidence(zero[0].configuration) == b'{"lr": 0.1, "steps": 5}'
    assert b"torch==" in (folder.evidence(zero[0].code.packages) or b"")
    assert folder.evidence(zero[0].code.script.sha256) is not None


def policy_of(folder: RunFolder) -> LogPolicy:
    return LogPolicy((Log(Verifier.parse(folder.vkey.read_text().strip())),))


def test_rank_0_logs_every_statement_of_every_rank(run: Path, authorities: Any) -> None:
    folder = open_run(run)
    signed = open_checkpoint(read_checkpoint(folder.log), policy_of(folder))
    tree = StoredTree(folder.log, signed.size)
    tree.check_all(signed.root)
    assert sorted(tree.entries()) == sorted(envelope for _, envelope in folder.statements())
    assert signed.size == 3 * WORLD
    assert not (folder.path / folder.key.name).exists()


def killed(rank: int, world: int, folder: str) -> None:
    records = sealring.record_run(folder, every=1, rank=rank, world=world)
    records.step()
    records.flush()
    records.close(final=False)  # leaves what a worker killed at this point would leave


def test_a_worker_that_starts_again_continues_its_chain(
    tmp_path: Path, workers: Workers, authorities: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    folder = str(tmp_path / "run")
    workers.run(killed, folder, world=WORLD)
    workers.run(train, folder, 3, world=WORLD)
    chain = chains(tmp_path / "run", authorities)[1]
    assert [one.sequence for _, one in chain] == list(range(len(chain)))
    assert all(after.previous == before for (before, _), (_, after) in itertools.pairwise(chain))
    assert [one.final for _, one in chain] == [False] * (len(chain) - 1) + [True]
    assert (chain[-1][1].end_step, chain[0][1].run) == (3, chain[-1][1].run)
    with pytest.raises(ConfigurationError, match="has ended"):
        sealring.record_run(folder, rank=1, world=WORLD)


def test_a_worker_that_goes_back_names_the_checkpoint_of_that_step(
    tmp_path: Path, authorities: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker did four steps, and continues from the checkpoint of the second."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    with sealring.record_run(tmp_path / "run", every=10, rank=0, world=1) as records:
        for step in records.steps(4):
            if step == 1:
                note_checkpoint_out("model@1", "bb" * 32)
        note_checkpoint_in("model@1", "bb" * 32)
        records.resume_at(2)
        list(records.steps(4))
    made = [one for chain in chains(tmp_path / "run", authorities) for _, one in chain]
    assert [(one.first_step, one.end_step) for one in made] == [(0, 4), (2, 4)]
    assert [[read.step for read in one.checkpoints_in] for one in made] == [[], [2]]


def test_a_dataset_that_was_opened_before_the_recording_is_named(
    tmp_path: Path, authorities: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    monkeypatch.setattr(noted, "OPENED", {})
    note_opened("before", "aa" * 32)
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        records.step()
        note_opened("during", "bb" * 32)
        note_opened("during", "bb" * 32)
    first, last = [one for chain in chains(tmp_path / "run", authorities) for _, one in chain]
    assert ("before", "aa" * 32) in {(one.name, one.sha256) for one in first.data}
    assert [(one.name, one.first, one.end) for one in last.data] == [("during", 0, 0)]


@pytest.mark.threat("L14")
def test_a_strangers_statement_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    stranger = load_credentials(0, 1, {"SEALRING_SECRET": secrets.token_hex(32)})
    interval = verify_statement(
        next(open_run(run).statements())[1], load_credentials(0, WORLD).authorities
    ).content
    with sealring.record_run(tmp_path / "run", rank=0, world=1):
        folder = open_run(tmp_path / "run")
        folder.write_statement("stranger", sign_statement(interval, stranger))
    assert "stranger is not logged" in caplog.text
    size = open_checkpoint(read_checkpoint(folder.log), policy_of(folder)).size
    assert (size, len(folder.statement_names())) == (1, 2)


def recorded(folder: Path, steps: int, *, final: bool = True) -> RunFolder:
    """Record a run of one rank, with a statement every step."""
    records = sealring.record_run(folder, every=1, rank=0, world=1)
    for _ in records.steps(steps):
        pass
    records.close(final=final)
    return open_run(folder)


def logged_runs(folder: RunFolder) -> set[str]:
    signed = open_checkpoint(read_checkpoint(folder.log), policy_of(folder))
    own = load_credentials(0, 1).authorities
    entries = StoredTree(folder.log, signed.size).entries()
    contents = [verify_statement(entry, own).content for entry in entries]
    return {one.run for one in contents if isinstance(one, Interval)}


@pytest.mark.threat("L14")
def test_a_statement_of_another_run_is_not_logged_and_ends_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    earlier = recorded(tmp_path / "earlier", 1)
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        folder = open_run(tmp_path / "run")
        folder.write_statement("other", earlier.read_statement("rank-00000-00000001"))
        records.step()
    assert f"other is not logged: it is of run {earlier.head.run}" in caplog.text
    assert logged_runs(folder) == {folder.head.run}


@pytest.mark.threat("L15")
def test_a_chain_goes_on_from_no_other_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the disk's owner would choose the step a worker resumes at, and what it signs."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    earlier = recorded(tmp_path / "earlier", 4, final=False)
    own = load_credentials(0, 1)
    mine = verify_statement(earlier.read_statement("rank-00000-00000003"), own.authorities).content
    assert isinstance(mine, Interval)
    folder = recorded(tmp_path / "run", 2, final=False)
    of_this = replace(mine, run=folder.head.run, world=2)
    made = Transformation("stage", "s", [], [Named("x", "ab" * 32)], [], parameters_of({}), 1, NOW)
    for envelope in (
        earlier.read_statement("rank-00000-00000003"),
        folder.read_statement("rank-00000-00000001"),
        sign_statement(of_this, load_credentials(1, 2)),
        sign_statement(made, own),
    ):
        path = folder.write_statement("rank-00000-00000003", envelope)
        with pytest.raises(MalformedRun, match="is not statement 3 of rank 0 in run"):
            sealring.record_run(folder.path, rank=0, world=1)
        path.unlink()
    assert recorded(folder.path, 3).head == folder.head


@pytest.mark.threat("L15")
def test_a_statement_that_is_in_the_log_is_not_signed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit would report that the worker signed two statements with one number."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    folder = recorded(tmp_path / "run", 3, final=False)
    last = max(folder.statement_names())
    envelope = folder.read_statement(last)
    folder.statement_path(last).unlink()
    with pytest.raises(MalformedRun, match=r"is in the log .* it was removed or exchanged"):
        sealring.record_run(folder.path, rank=0, world=1)
    folder.write_statement(last, envelope)
    recorded(folder.path, 4)


def test_a_statement_is_logged_under_its_own_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the last statement of a restarting rank that is in the log."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    folder = recorded(tmp_path / "run", 2, final=False)
    names = folder.statement_names()
    own = load_credentials(0, 1)
    mine = verify_statement(folder.read_statement(max(names)), own.authorities).content
    assert isinstance(mine, Interval)
    folder.write_statement("later", sign_statement(replace(mine, sequence=10**9), own))
    recorded(folder.path, 3, final=False)
    assert f"later is not logged: it is statement {10**9} of rank 0, under another" in caplog.text
    recorded(folder.path, 4)


FAILS = """
import sys, sealring
for step in sealring.record_run(sys.argv[1], every=1, rank=0, world=1).steps(3):
    assert step < 2, "the script fails"
"""


def test_a_script_that_fails_has_not_ended_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, "the script fails" in done.stderr) == (1, True)
    folder = open_run(tmp_path / "run")
    authorities = load_credentials(0, 1).authorities
    contents = [verify_statement(one, authorities).content for _, one in folder.statements()]
    assert [one.final for one in contents if isinstance(one, Interval)] == [False, False]
    assert recorded(folder.path, 3).head == folder.head


def test_a_worker_that_did_nothing_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may refuse the folder meanwhile. The others then stop before their first step."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    folder = recorded(tmp_path / "run", 2, final=False)
    names = folder.statement_names()
    assert recorded(folder.path, 2, final=False).statement_names() == names


@pytest.mark.threat("L16")
def test_a_logs_key_is_used_for_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    folder = recorded(tmp_path / "run", 1)
    shutil.rmtree(folder.path)
    folder.key.with_name("run.key.signed").unlink()
    with pytest.raises(ConfigurationError, match="one key must not sign two logs"):
        sealring.record_run(folder.path, rank=0, world=1)


@pytest.mark.threat("L21")
def test_a_rank_that_was_killed_while_it_made_the_log_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sealring.formats.files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            create_log(tmp_path / "run" / "log", Signer.generate("x", SignatureKind.NOTE))
    folder = recorded(tmp_path / "run", 1)
    assert logged_runs(folder) == {folder.head.run}


def test_without_a_recording_notes_are_dropped() -> None:
    note_data("corpus", "aa" * 32, 0, 0, 8)
    note_checkpoint_in("model@1", "bb" * 32)
    note_checkpoint_out("model@1", "bb" * 32)


def test_what_record_run_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("_SEALRING_RECORD", raising=False)
    with pytest.raises(ConfigurationError, match="where should the records go"):
        sealring.record_run()
    with pytest.raises(ConfigurationError, match="which worker is this"):
        sealring.record_run(tmp_path / "run")
    with sealring.record_run(tmp_path / "run", rank=0, world=1) as records:
        assert sealring.record_run(tmp_path / "run") is records
        with pytest.raises(ConfigurationError, match="is recorded in"):
            sealring.record_run(tmp_path / "other")
        with pytest.raises(ConfigurationError, match="at least one step"):
            records.configure(0)
        with pytest.raises(ConfigurationError, match="configuration cannot be written"):
            records.configure(1, {"model": object()})
