"""Changes to a run's folder after it was written, and statements added to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import LogWriter, create_log, read_checkpoint
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import LogPolicy, Witness, byzantine_policy
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.forms import INTERVAL_TYPE, IntervalPredicate, Named
from sealring.record.statements.run_folder import RunFolder
from sealring.record.statements.signing import STATEMENT_TYPE, seal, sign_statement, worker_of
from tests.record.audit.made_runs import (
    CLEAN,
    CLEANER,
    CORPUS,
    NOW,
    RAW,
    Authority,
    MadeRun,
    sha,
    stage,
)
from tests.record.audit.stated_lies import data_of


def two_statements(made: MadeRun, run: RunFolder) -> None:
    other = replace(data_of(made.turns[1, 1], epoch=1), previous=made.digests[1, 0])
    made.add(run, "rank-1-1-again", sign_statement(other, made.workers[1]))


def signed_for_another_rank(made: MadeRun, run: RunFolder) -> None:
    """Rank 1 signs a statement in rank 0's name."""
    one = replace(made.turns[0, 1], previous=made.digests[0, 0])
    predicate = IntervalPredicate(worker_of(made.workers[0].certificate), one)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": s.name, "digest": {"sha256": s.sha256}} for s in one.subjects],
        "predicateType": INTERVAL_TYPE,
        "predicate": asdict(predicate),
    }
    envelope = seal(json.dumps(statement).encode(), made.workers[1])
    made.add(run, "rank-0-1-again", envelope)


def other_job(made: MadeRun, run: RunFolder) -> None:
    worker = made.authority.worker(1, made.world, job="another")
    made.add(run, "rank-1-3", sign_statement(made.turns[1, 0], worker))


def other_run(made: MadeRun, run: RunFolder) -> None:
    made.add(run, "rank-1-3", _of_other_run(made))


def added_of_other_run(made: MadeRun, run: RunFolder) -> None:
    run.statement_path("rank-1-3").write_bytes(_of_other_run(made))


def _of_other_run(made: MadeRun) -> bytes:
    return sign_statement(replace(made.turns[1, 0], run="run-0"), made.workers[1])


def unadmitted(made: MadeRun, run: RunFolder) -> None:
    stranger = Authority().worker(1, made.world)
    made.add(run, "rank-1-3", sign_statement(made.turns[1, 0], stranger))


def unknown_owner(made: MadeRun, run: RunFolder) -> None:
    one = stage("export", "export", [RAW], [Named("other.bin", sha("other"))], CLEANER)
    made.add(run, "made-other", sign_statement(one, Signer.generate("x", SignatureKind.NOTE).key))


def changed_statement(made: MadeRun, run: RunFolder) -> None:
    path = run.statement_path("rank-1-1")
    value = json.loads(path.read_bytes())
    value["payload"] = json.loads(run.statement_path("rank-1-0").read_bytes())["payload"]
    path.write_text(json.dumps(value, separators=(",", ":")))


def respelled(made: MadeRun, run: RunFolder) -> None:
    """Add the same statement written as other JSON, as if rank 1 had signed twice."""
    value = json.loads(run.statement_path("rank-1-1").read_bytes())
    made.add(run, "rank-1-1-again", json.dumps(value).encode())


def garbage(made: MadeRun, run: RunFolder) -> None:
    run.statement_path("rank-1-1").write_bytes(b'{"payload": 1, "payload": 2}')


def not_logged(made: MadeRun, run: RunFolder) -> None:
    one = stage("evaluate", "evaluation", [CORPUS], [Named("scores", sha("scores"))], CLEANER)
    run.statement_path("made-scores").write_bytes(sign_statement(one, made.owner))


def changed_entry(made: MadeRun, run: RunFolder) -> None:
    (bundle,) = (run.log / "tile" / "entries").rglob("*.p/*")
    content = bytearray(bundle.read_bytes())
    content[100] ^= 1
    bundle.write_bytes(content)


def cut(made: MadeRun, run: RunFolder) -> AuditTrust:
    """The owner rebuilds the log from its first entries, and removes the later statements."""
    whole = open_checkpoint(read_checkpoint(run.log), made.trust.log)
    late = {f"rank-{rank}-2" for rank in range(made.world)}
    kept = [envelope for name, envelope in made.envelopes() if name not in late]
    _rewrite(made, run, kept)
    for name in late:
        run.statement_path(name).unlink()
    return replace(made.trust, seen=[whole])


def fork(made: MadeRun, run: RunFolder) -> AuditTrust:
    """The owner shows the auditor a different log, in which one interval was changed."""
    trust = witnessed(made, run)
    made.made[0] = stage("clean", "ingest", [RAW], [CLEAN], Named("clean.py", sha("changed")))
    shutil.rmtree(run.path / "statements")
    (run.path / "statements").mkdir()
    entries = []
    for name, envelope in made.envelopes():
        run.statement_path(name).write_bytes(envelope)
        entries.append(envelope)
    _rewrite(made, run, entries)
    _cosign(made, run, WITNESSES[:1])
    return trust


WITNESSES = [
    Signer.generate(f"example.org/w{number}", SignatureKind.COSIGNATURE) for number in range(4)
]


def witnessed(made: MadeRun, run: RunFolder) -> AuditTrust:
    """Return a trust that holds a checkpoint one reader saw, cosigned by two witnesses."""
    witnesses = tuple(Witness(one.name, one.verifier) for one in WITNESSES)
    policy = LogPolicy(made.trust.log.logs, witnesses)
    _cosign(made, run, WITNESSES[:2])
    seen = open_checkpoint(read_checkpoint(run.log), policy)
    return replace(made.trust, log=policy, seen=[seen])


def no_quorum(made: MadeRun, run: RunFolder) -> AuditTrust:
    witnesses = [Witness(one.name, one.verifier) for one in WITNESSES]
    _cosign(made, run, WITNESSES[:2])
    return replace(made.trust, log=byzantine_policy(made.trust.log.logs, witnesses))


def _rewrite(made: MadeRun, run: RunFolder, entries: list[bytes]) -> None:
    shutil.rmtree(run.log)
    create_log(run.log, made.signer)
    made.append(run, entries)


def _cosign(made: MadeRun, run: RunFolder, witnesses: list[Signer]) -> None:
    with LogWriter(run.log, made.signer) as writer:
        text = writer.checkpoint.note.text
        writer.add_cosignatures([one.sign(text, int(NOW.timestamp())) for one in witnesses])
