"""One admitted worker signs alone how data was made, or which file a run exported."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.errors import MalformedRun
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import RunClaims, StageClaim
from sealring.record.audit.findings import Fault, Said
from sealring.record.audit.page import page
from sealring.record.audit.records import AuditTrust
from sealring.record.papers import facts_of
from sealring.record.statements.forms import Named, Transformation
from sealring.record.statements.run_folder import RunFolder
from sealring.record.statements.signing import sign_statement
from tests.record.audit.made_runs import CLEANER, MODEL, RAW, MadeRun, checkpoint, sha, stage

FOREIGN = b"weights of another model"
END = checkpoint(30)
EXPORT = stage(
    "export", "export", [Named(END.name, END.sha256)],
    [Named("model.bin", hashlib.sha256(FOREIGN).hexdigest())], Named("x", sha("x")),
)  # fmt: skip
CLAIMS = RunClaims(
    trained_only_on=frozenset({RAW.sha256}),
    stages=(StageClaim("clean", None), StageClaim("tokenize", None)),
)


@pytest.fixture
def made() -> MadeRun:
    return MadeRun()


def signed_by_workers(
    made: MadeRun, run: RunFolder, ranks: range | list[int], one: Transformation
) -> None:
    for rank in ranks:
        # Each rank has its own clock.
        timed = replace(one, finished=one.finished + rank)
        made.add(run, f"{one.name}-{rank}", sign_statement(timed, made.workers[rank]))


def without_owners(made: MadeRun) -> AuditTrust:
    return replace(made.trust, owners=())


def ask(run: RunFolder, trust: AuditTrust, content: bytes) -> AuditResult:
    file = run.path.with_name("model.bin")
    file.write_bytes(content)
    return audit(run.path, trust, AuditQuestion(CLAIMS, file))


def answer(result: AuditResult, claim: str) -> tuple[Said, str]:
    (found,) = (one for one in result.answers if one.claim == claim)
    return found.said, found.text


@pytest.mark.threat("A3")
def test_a_worker_presents_a_run_of_its_own_as_the_jobs(tmp_path: Path) -> None:
    """The certificate states no world size, so the worker claims a world of one rank."""
    made = MadeRun(world=1)
    made.workers[0] = made.authority.worker(0, None)
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, [0], EXPORT)
    said, text = answer(ask(run, without_owners(made), FOREIGN), "model")
    assert said is Said.NOT_SHOWN
    assert "rank 0 alone says that it is" in text
    assert "whose certificates name the world's size" in text


@pytest.mark.threat("A3")
def test_rank_3_alone_exports_a_foreign_file(made: MadeRun, tmp_path: Path) -> None:
    """The audit once answered yes here, with exit status 0."""
    made.made = made.made[:2]
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, [3], EXPORT)
    result = ask(run, made.trust, FOREIGN)
    said, text = answer(result, "model")
    assert said is Said.NOT_SHOWN
    assert "rank 3 alone says that it is: an owner's record counts" in text
    assert result.status is Status.NOT_SHOWN
    assert "no: rank 3 alone signed it" in page(result)


@pytest.mark.threat("A3")
def test_rank_3_exports_a_foreign_file_beside_the_owners(made: MadeRun, tmp_path: Path) -> None:
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, [3], EXPORT)
    result = ask(run, made.trust, FOREIGN)
    assert answer(result, "model")[0] is Said.NO
    assert [one.fault for one in result.findings] == [Fault.MODEL]
    result = ask(run, made.trust, MODEL)
    said, text = answer(result, "model")
    assert (said, result.status) == (Said.YES, Status.SHOWN)
    assert "as the owner " in text


@pytest.mark.threat("A3")
def test_all_ranks_but_one_export_a_foreign_file(made: MadeRun, tmp_path: Path) -> None:
    made.made = []
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, [0, 1, 3], EXPORT)
    assert answer(ask(run, without_owners(made), FOREIGN), "model")[0] is Said.NOT_SHOWN


def test_an_export_that_all_ranks_sign_counts_where_no_owner_is_named(
    made: MadeRun, tmp_path: Path
) -> None:
    made.made = []
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, range(4), EXPORT)
    said, text = answer(ask(run, without_owners(made), FOREIGN), "model")
    assert said is Said.YES
    assert "as all 4 ranks signed" in text
    assert answer(ask(run, made.trust, FOREIGN), "model")[0] is Said.NOT_SHOWN


@pytest.mark.threat("A3")
def test_rank_3_signs_how_data_was_made_that_no_owner_approved(
    made: MadeRun, tmp_path: Path
) -> None:
    foreign = Named("foreign", sha("foreign"))
    made.made = made.made[2:]
    for rank in range(4):
        made.each(
            rank,
            lambda one: replace(
                one, data=[replace(one.data[0], name="foreign", sha256=foreign.sha256)]
            ),
        )
    run = made.write(tmp_path / "run")
    between = Named("between", sha("between"))
    signed_by_workers(made, run, [3], stage("clean", "ingest", [RAW], [between], CLEANER))
    signed_by_workers(made, run, [3], stage("tokenize", "stage", [between], [foreign], CLEANER))
    result = ask(run, made.trust, MODEL)
    said, text = answer(result, "trained_only_on")
    assert (said, text) == (
        Said.NO, f"training came from foreign ({foreign.sha256[:12]}), which is not listed",
    )  # fmt: skip
    said, text = answer(result, "stages")
    assert said is Said.NOT_SHOWN
    assert "no record says how foreign was made; rank 3 alone says how" in text
    signed_by_workers(made, run, [0, 1, 2], stage("clean", "ingest", [RAW], [between], CLEANER))
    signed_by_workers(
        made, run, [0, 1, 2], stage("tokenize", "stage", [between], [foreign], CLEANER)
    )
    agreed = audit(run.path, without_owners(made), AuditQuestion(CLAIMS))
    assert answer(agreed, "stages")[1].endswith("how data was made is signed by all 4 ranks")


def test_answers_about_data_name_who_signed_its_stages(made: MadeRun, tmp_path: Path) -> None:
    result = ask(made.write(tmp_path / "run"), made.trust, MODEL)
    for claim in ("stages", "trained_only_on"):
        said, text = answer(result, claim)
        assert said is Said.YES
        assert "how data was made is signed by the owner " in text


@pytest.mark.threat("A3")
def test_a_single_worker_contradicts_no_owner(made: MadeRun, tmp_path: Path) -> None:
    """Otherwise one worker could refute any run by claiming that a dataset was made differently."""
    run = made.write(tmp_path / "run")
    other = replace(made.made[1], inputs=[Named("other", sha("other"))])
    signed_by_workers(made, run, [3], other)
    assert ask(run, made.trust, MODEL).status is Status.SHOWN


@pytest.mark.threat("A3")
def test_papers_take_no_export_of_a_worker(made: MadeRun, tmp_path: Path) -> None:
    made.evidence = [b"packages"]
    for rank in range(4):
        made.each(
            rank,
            lambda one: replace(
                one, code=replace(one.code, packages=hashlib.sha256(b"packages").hexdigest())
            ),
        )
    run = made.write(tmp_path / "run")
    signed_by_workers(made, run, [3], EXPORT)
    owner: Ed25519PrivateKey = made.owner
    facts = facts_of(run, [made.authority.certificate], [owner.public_key()])
    facts.export_of(hashlib.sha256(MODEL).hexdigest())
    with pytest.raises(MalformedRun, match="no export of run"):
        facts.export_of(EXPORT.outputs[0].sha256)
