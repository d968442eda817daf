"""A run's folder may come from a stranger: nothing in it makes an audit read, run or show more."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.errors import MalformedRun
from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import read_checkpoint
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from sealring.record.audit import data
from sealring.record.audit.audit import AuditQuestion, Status, audit
from sealring.record.audit.claims import RunClaims, StageClaim
from sealring.record.audit.findings import Fault, Said
from sealring.record.audit.page import page
from sealring.record.statements import run_folder
from sealring.record.statements.forms import CheckpointRef, Named, Share
from sealring.record.statements.run_folder import RunFolder
from tests.record.audit.made_runs import CLEANER, CORPUS, MadeRun, sha, stage
from tests.record.audit.stated_lies import data_of

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e</script><!--'


@pytest.fixture
def made() -> MadeRun:
    return MadeRun(world=2, count=2)


@pytest.fixture
def run(made: MadeRun, tmp_path: Path) -> RunFolder:
    return made.write(tmp_path / "run")


@pytest.mark.threat("A9")
def test_a_symlink_anywhere(made: MadeRun, run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    for place in ("statements/x.dsse.json", "log/tile/x", "evidence", "x"):
        path = run.path / place
        path.symlink_to(tmp_path / "outside")
        with pytest.raises(MalformedRun, match="symlink or a special file"):
            audit(run.path, made.trust)
        path.unlink()
    assert audit(run.path, made.trust).status is Status.SHOWN


@pytest.mark.threat("A9")
def test_a_pipe_does_not_hold_up_the_audit(made: MadeRun, run: RunFolder) -> None:
    os.mkfifo(run.path / "statements" / "x.dsse.json")
    with pytest.raises(MalformedRun, match="special file"):
        audit(run.path, made.trust)


@pytest.mark.parametrize(
    "name",
    [
        "x", "RUN.JSON", "statements", "statements/x", "statements/A.dsse.json", "evidence/x",
        "log/x", "log/tile/0/x", "log/tile/entries/000/x", ".new/x", "\x1b[2J",
    ],
)  # fmt: skip
@pytest.mark.threat("A9")
def test_a_file_that_no_run_has(made: MadeRun, run: RunFolder, name: str) -> None:
    path = run.path / name
    if name == "statements":
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"")
    with pytest.raises(MalformedRun, match="is no file of a run"):
        audit(run.path, made.trust)


def test_what_a_killed_writer_leaves_is_no_fault(made: MadeRun, run: RunFolder) -> None:
    for name in (".new/0123456789abcdef", "log/.new/0123456789abcdef", "log/.lock"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert audit(run.path, made.trust).status is Status.SHOWN


@pytest.mark.threat("A9")
def test_folders_without_end(made: MadeRun, run: RunFolder) -> None:
    deep = run.path / "log" / "/".join(["d"] * 20)
    deep.mkdir(parents=True)
    with pytest.raises(MalformedRun, match="deeper than"):
        audit(run.path, made.trust)


def test_more_files_than_an_audit_reads(
    made: MadeRun, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MAX_FILES", 5)
    with pytest.raises(MalformedRun, match="more than an audit reads"):
        audit(run.path, made.trust)


@pytest.mark.threat("A9")
def test_more_bytes_than_an_audit_reads(made: MadeRun, run: RunFolder) -> None:
    with (run.path / "statements" / "x.dsse.json").open("wb") as file:
        file.truncate(run_folder.MAX_BYTES)
    with pytest.raises(MalformedRun, match="more than an audit reads"):
        audit(run.path, made.trust)


@pytest.mark.parametrize("where", ["folder", "log"])
@pytest.mark.threat("A9")
def test_statements_are_held_one_at_a_time(
    made: MadeRun, run: RunFolder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Together these take 44 MB, and none is believed. A log is read in pieces of 5 MB."""
    monkeypatch.setattr("sealring.formats.log.folder.BUNDLES_KEPT", 1)
    envelopes = [b'{"payload"%d' % number + b" " * 20_000 for number in range(2200)]
    if where == "log":
        made.append(run, envelopes)
    else:
        for number, envelope in enumerate(envelopes):
            run.statement_path(f"x{number}").write_bytes(envelope)
    tracemalloc.start()
    try:
        result = audit(run.path, made.trust)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    faults = [one.fault for one in result.findings]
    assert faults.count(Fault.UNREADABLE) == len(envelopes)
    assert most < 30_000_000


@pytest.mark.parametrize(
    "content", [b"", b"[" * 60_000, b'{"payload":"","payload":""}', b"\xff\xfe", b"{}" * 9]
)
def test_a_logged_statement_that_is_none(made: MadeRun, run: RunFolder, content: bytes) -> None:
    made.add(run, "x", content)
    result = audit(run.path, made.trust)
    assert [one.fault for one in result.findings] == [Fault.UNREADABLE]
    assert result.status is Status.NOT_SHOWN


def test_a_long_chain_of_stages_ends(made: MadeRun, tmp_path: Path) -> None:
    last = CORPUS
    for number in range(1500):
        before = Named(f"d{number}", sha(f"d{number}"))
        made.made.append(stage(f"s{number}", "stage", [before], [last], CLEANER))
        last = before
    made.made = made.made[2:]
    run = made.write(tmp_path / "run")
    claims = RunClaims(stages=(StageClaim("clean", None),))
    (answer,) = audit(run.path, made.trust, AuditQuestion(claims)).answers
    assert answer.said in (Said.NO, Said.NOT_SHOWN)


@pytest.mark.threat("A14")
def test_names_are_text_in_the_page_and_nothing_else(made: MadeRun, tmp_path: Path) -> None:
    for rank in range(2):
        made.each(
            rank,
            lambda one: replace(
                one,
                data=[replace(one.data[0], name=EVIL)],
                code=replace(one.code, script=Named(EVIL, sha("x"))),
                checkpoints_out=[replace(one.checkpoints_out[0], name=EVIL)],
            ),
        )
    made.made = [
        stage(EVIL, "export", [Named(EVIL, sha("in"))], [Named(EVIL, sha("out"))], CLEANER)
    ]
    made.change(1, 1, world=2, configuration=sha("other"))
    made.workers[1] = made.authority.worker(1, 2)
    result = audit(made.write(tmp_path / "run").path, made.trust)
    html = page(result)
    assert html.count("<script") == 3  # two of data, and the page's own
    assert html.count("</script>") == 3
    assert "<img" not in html
    assert EVIL not in html
    data = html.partition('id="records">')[2].partition("</script>")[0]
    scripts = [
        value["predicate"]["interval"]["code"]["script"]["name"]
        for _, payload in json.loads(data)
        if "interval" in (value := json.loads(payload))["predicate"]
    ]
    assert set(scripts) == {EVIL}  # whole, for the one who looks at the record


def test_half_a_character_is_no_text(made: MadeRun, tmp_path: Path) -> None:
    """JSON can name half of a surrogate pair, which cannot be written to a file."""
    for rank in range(2):
        made.each(rank, lambda one: replace(one, data=[replace(one.data[0], name="\ud800")]))
    result = audit(made.write(tmp_path / "run").path, made.trust)
    assert {one.fault for one in result.findings} == {Fault.UNREADABLE}
    page(result).encode()


@pytest.mark.threat("A9")
def test_very_many_names_of_checkpoints_name_few_records_each(
    made: MadeRun, tmp_path: Path
) -> None:
    """Every rank writes and reads its own version of each name, so they all contradict."""
    for rank, sequence in made.turns:
        end = made.turns[rank, sequence].end_step
        refs = [
            CheckpointRef("x", end, sha(f"{rank} {sequence} {number}"), None)
            for number in range(120)
        ]
        made.change(rank, sequence, checkpoints_out=refs[:60], checkpoints_in=refs[60:])
    result = audit(made.write(tmp_path / "run").path, made.trust)
    assert len(result.findings) >= 240
    assert max(len(one.against) for one in result.findings) <= len(made.turns)


@pytest.mark.threat("A9")
def test_spans_that_are_listed_one_by_one_are_counted(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks' shares fit together, and their periods start at different samples."""
    monkeypatch.setattr(data, "MAX_COMPARED", 20_000)
    one = made.turns[0, 0].data[0]
    share = Share(2, 0, 1)
    made.change(0, 0, data=[replace(one, first=0, end=40_002, share=share)])
    pieces = [
        replace(one, first=1 + at, end=4_001 + at, share=share) for at in range(0, 40_000, 4_000)
    ]
    made.change(1, 0, data=pieces)
    found = audit(made.write(tmp_path / "run").path, made.trust).findings
    assert "the ranges of corpus overlap in too many ways to be compared" in [
        one.text for one in found
    ]


@pytest.mark.threat("A9")
def test_very_long_ways_through_stages_are_not_held(made: MadeRun, tmp_path: Path) -> None:
    made.made = []
    last = Named("raw", sha("raw"))
    for number in range(9):  # twice as many ways with each
        one, other, both = (Named(f"{x}{number}", sha(f"{x}{number}")) for x in "abc")
        made.made += [
            stage("one", "stage", [last], [one], CLEANER),
            stage("other", "stage", [last], [other], CLEANER),
            stage("both", "stage", [one, other], [both], CLEANER),
        ]
        last = both
    for number in range(150):
        following = Named(f"d{number}", sha(f"d{number}"))
        made.made.append(stage("more", "stage", [last], [following], CLEANER))
        last = following
    made.made.append(stage("end", "stage", [last], [CORPUS], CLEANER))
    claims = RunClaims(stages=(StageClaim("clean", None),))
    (answer,) = audit(made.write(tmp_path / "run").path, made.trust, AuditQuestion(claims)).answers
    assert answer.said is Said.NOT_SHOWN
    assert "too many ways" in answer.text


@pytest.mark.threat("A9")
def test_a_log_with_more_entries_than_an_audit_reads(
    made: MadeRun, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.record.audit.records.MAX_FILES", 6)
    (finding,) = audit(run.path, made.trust).findings
    assert finding.fault is Fault.LOG_REFUSED
    assert "the log has 7 entries, and an audit reads 6" in finding.text


def test_a_checkpoint_of_another_log_is_not_passed_over(made: MadeRun, run: RunFolder) -> None:
    """The auditor kept it to compare with, and the owner shows another of its logs."""
    other = MadeRun(
        signer=Signer.generate("example.com/first", SignatureKind.NOTE), world=2, count=2
    )
    first = other.write(run.path.with_name("first"))
    logs = LogPolicy((Log(made.signer.verifier), Log(other.signer.verifier)))
    seen = open_checkpoint(read_checkpoint(first.log), logs)
    (finding,) = audit(run.path, replace(made.trust, log=logs, seen=[seen])).findings
    assert (finding.fault, finding.parties) == (Fault.LOG_REFUSED, ("the log's owner",))
    assert finding.text.startswith("log.wrong: ")


def test_the_outputs_of_one_stage_are_told_apart(made: MadeRun, tmp_path: Path) -> None:
    """All ranks train on the part that the stage put aside for testing."""
    split = [CORPUS, Named("held-out", sha("held-out"))]
    made.made[1] = replace(made.made[1], outputs=split)
    for rank in range(2):
        made.each(rank, lambda one: data_of(one, sha256=sha("held-out")))
    found = audit(made.write(tmp_path / "run").path, made.trust).findings
    assert [(one.fault, one.parties) for one in found] == [
        (Fault.TRANSFORMATION, (f"rank {rank}", "the disk")) for rank in range(2)
    ]
