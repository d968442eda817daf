"""A broker's published log is compared with a run's certificates: who was admitted, until when.

The broker and its workers are real. The records are made here, and each worker signs them with the
credentials it was given.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.broker.audit import PublishedLog, encode
from sealring.attest.evidence.cache import read_policy
from sealring.attest.evidence.worker import claims_in
from sealring.core.identity.certificates import ATTESTATION_OID, issue
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName
from sealring.errors import ConfigurationError, TamperedLog
from sealring.formats.log.broker_entries import BrokerHistory
from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import LogWriter, StoredTree, create_log, read_checkpoint
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import RunClaims
from sealring.record.audit.findings import Fault, Said
from sealring.record.audit.records import AuditTrust
from tests.attest.broker.local import Place, Running, running
from tests.record.audit.made_runs import JOB, MadeRun
from tests.record.audit.test_command import run as run_command


@dataclass
class Job:
    """A job of two ranks that a broker has admitted. Its records are not written yet."""

    broker: Running
    made: MadeRun
    folder: Path

    def worker(self, rank: int, key: Ed25519PrivateKey | None = None) -> Credentials:
        key = key or Ed25519PrivateKey.generate()
        joined = self.broker.join(rank, 2, key)
        authority = self.broker.place.keys.authority
        return Credentials(JOB, rank, joined.certificate, (authority,), KeptKey.of(key))

    def write(self, finished: float) -> None:
        """Write the ranks' statements, all with this time as their end."""
        moment = int(finished)
        for place, one in self.made.turns.items():
            self.made.turns[place] = replace(one, started=moment, finished=moment)
        self.made.write(self.folder / "run")

    @property
    def log(self) -> Path:
        return self.folder / "published"

    @property
    def key(self) -> Signer:
        return self.broker.place.keys.audit_key

    def publish(self) -> None:
        PublishedLog(self.log, self.key, self.folder / "remembered").update(self.broker.store)

    def entries(self) -> list[bytes]:
        size = int((self.log / "checkpoint").read_text().splitlines()[1])
        return list(StoredTree(self.log, size).entries())

    def publish_instead(self, entries: list[bytes], signer: Signer | None = None) -> None:
        """Replace the log by one that the operator made up."""
        shutil.rmtree(self.log)
        create_log(self.log, signer or self.key)
        with LogWriter(self.log, signer or self.key) as writer:
            writer.append(entries)

    @property
    def trust(self) -> AuditTrust:
        return replace(
            self.made.trust, authorities=[self.broker.place.keys.authority],
            brokers=LogPolicy((Log(self.key.verifier),)),
        )  # fmt: skip

    def audit(self, trust: AuditTrust | None = None, logs: int = 1) -> AuditResult:
        policy, _ = read_policy(self.broker.place.policy)
        question = AuditQuestion(RunClaims(machines=policy), broker_logs=[self.log] * logs)
        return audit(self.folder / "run", trust or self.trust, question)


@contextmanager
def admitted(folder: Path) -> Iterator[Job]:
    (folder / "broker").mkdir()
    with running(Place(folder / "broker")) as broker:
        job = Job(broker, MadeRun(world=2, count=2), folder)
        for rank in range(2):
            job.made.workers[rank] = job.worker(rank)
        yield job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with admitted(tmp_path) as found:
        yield found


def faults(result: AuditResult) -> list[tuple[Fault, tuple[str, ...]]]:
    return [(one.fault, one.parties) for one in result.findings]


NOT_GIVEN = (Fault.NOT_GIVEN, ("rank 1", "the broker's operator"))
REFUSED = (Fault.LOG_REFUSED, ("the broker's operator", "the disk"))


def test_workers_that_were_admitted(job: Job) -> None:
    job.publish()
    job.write(time.time())
    result = job.audit()
    assert (faults(result), result.status) == ([], Status.SHOWN)
    assert [one.said for one in result.answers] == [Said.YES]


def unlogged(job: Job, key: Ed25519PrivateKey, lifetime: timedelta, now: datetime) -> Credentials:
    """The operator signs a certificate with the authority's key, with the claims of rank 1's."""
    keys, true = job.broker.place.keys, job.made.workers[1].certificate
    claimed = true.extensions.get_extension_for_oid(ATTESTATION_OID).value.public_bytes()
    certificate = issue(
        keys.authority, keys.authority_key, key.public_key(), WorkerName(JOB, 1), 2, lifetime, now,
        attestation=claimed,
    )  # fmt: skip
    return Credentials(JOB, 1, certificate, (keys.authority,), KeptKey.of(key))


@pytest.mark.threat("A4")
def test_a_key_that_the_broker_never_admitted(job: Job) -> None:
    job.publish()
    now = datetime.now(UTC)
    job.made.workers[1] = unlogged(job, Ed25519PrivateKey.generate(), timedelta(minutes=9), now)
    job.write(time.time())
    # Without the broker's log there is only the authority's signature to go by.
    assert job.audit(logs=0).status is Status.SHOWN
    result = job.audit()
    assert faults(result) == [NOT_GIVEN]
    assert set(result.findings[0].records) == {job.made.digests[1, 0], job.made.digests[1, 1]}
    assert [one.said for one in result.answers] == [Said.NO]


@pytest.mark.threat("A4")
def test_a_further_certificate_for_a_key_that_was_admitted(job: Job) -> None:
    """Its times differ from the log's. A worker could stay in this way without new evidence."""
    key = Ed25519PrivateKey.generate()
    job.broker.decide(lambda ledger, view: ledger.release(view, time.time(), WorkerName(JOB, 1)))
    job.made.workers[1] = job.worker(1, key)
    job.publish()
    later = datetime.now(UTC) + timedelta(minutes=6)
    job.made.workers[1] = unlogged(job, key, timedelta(days=365), later)
    job.write(later.timestamp())
    assert faults(job.audit()) == [NOT_GIVEN]


@pytest.mark.parametrize("finished", ["before", "after"])
@pytest.mark.parametrize("how", ["revoked", "released"])
@pytest.mark.threat("A4")
def test_a_worker_that_was_taken_out_and_goes_on(job: Job, how: str, finished: str) -> None:
    before = time.time() - 2
    if how == "revoked":
        job.broker.revoke(1)
    else:
        name = WorkerName(JOB, 1)
        job.broker.decide(lambda ledger, view: ledger.release(view, time.time(), name))
    job.publish()
    job.write(before if finished == "before" else time.time() + 2)
    result = job.audit()
    assert faults(result) == ([] if finished == "before" else [(Fault.REVOKED, ("rank 1",))])
    said = Said.YES if finished == "before" else Said.NO
    assert [one.said for one in result.answers] == [said]


def test_a_worker_that_left_by_itself_is_not_out(job: Job) -> None:
    holder = job.broker.store.submit(lambda view: view.get(f"rank/{JOB}/00001")).result()
    assert holder is not None
    left = WorkerName(JOB, 1)
    job.broker.decide(lambda ledger, view: ledger.leave(view, time.time(), left, holder["key"]))
    job.publish()
    job.write(time.time() + 2)
    assert job.audit().status is Status.SHOWN


def cut(entries: list[bytes]) -> list[bytes]:
    return entries[:2]


def without_rank_1(entries: list[bytes]) -> list[bytes]:
    return renumbered([one for one in map(json.loads, entries) if one["rank"] == 0])


def other_kind(entries: list[bytes]) -> list[bytes]:
    found = [json.loads(one) for one in entries]
    return renumbered([{**one, "kind": "snp Milan"} if one["rank"] else one for one in found])


def renumbered(entries: list[dict[str, object]]) -> list[bytes]:
    return [encode({**one, "number": number}) for number, one in enumerate(entries)]


def exchanged(entries: list[bytes]) -> list[bytes]:
    return [entries[1], entries[0], *entries[2:]]


def garbage(entries: list[bytes]) -> list[bytes]:
    return [*entries, b"not JSON"]


@pytest.mark.parametrize(
    ("rewrite", "found"),
    [
        (cut, NOT_GIVEN), (without_rank_1, NOT_GIVEN), (other_kind, NOT_GIVEN),
        (exchanged, REFUSED), (garbage, REFUSED),
    ],
)  # fmt: skip
@pytest.mark.threat("A4")
def test_a_log_that_the_operator_signed_anew(
    job: Job, rewrite: Callable[[list[bytes]], list[bytes]], found: tuple[Fault, tuple[str, ...]]
) -> None:
    job.publish()
    job.publish_instead(rewrite(job.entries()))
    job.write(time.time())
    assert faults(job.audit()) == [found]


@pytest.mark.threat("A4")
def test_the_log_of_another_broker(job: Job, tmp_path: Path) -> None:
    job.publish()
    job.write(time.time())
    (tmp_path / "other").mkdir()
    with admitted(tmp_path / "other") as other:
        other.publish()
        shutil.rmtree(job.log)
        shutil.copytree(other.log, job.log)
        assert faults(job.audit()) == [REFUSED]  # of a log that is not believed
        both = LogPolicy((Log(job.key.verifier), Log(other.key.verifier)))
        result = job.audit(replace(job.trust, brokers=both))
        assert faults(result) == [REFUSED]
        assert "log.wrong" in result.findings[0].text
        # With both authorities the log is compared, and it lists neither of these workers.
        believed = [*job.trust.authorities, *other.trust.authorities]
        result = job.audit(replace(job.trust, brokers=both, authorities=believed))
        assert [fault for fault, _ in faults(result)] == [Fault.NOT_GIVEN] * 2


@pytest.mark.parametrize("rewrite", ["cut", "other_kind"])
def test_a_log_that_contradicts_what_was_seen_of_it(job: Job, rewrite: str) -> None:
    """The operator hides a worker's revocation in a log that is complete and signed."""
    job.publish()
    before = job.entries()
    job.broker.revoke(1)
    job.publish()
    job.write(time.time() + 2)
    seen = open_checkpoint(read_checkpoint(job.log), LogPolicy((Log(job.key.verifier),)))
    believed = replace(job.trust, seen=[seen])
    assert faults(job.audit(believed)) == [(Fault.REVOKED, ("rank 1",))]
    hidden = {"cut": before, "other_kind": other_kind(job.entries())}[rewrite]
    job.publish_instead(hidden)
    (finding,) = job.audit(believed).findings
    assert (finding.fault, finding.parties) == REFUSED
    assert finding.text.startswith(
        {"cut": "log.truncated_log", "other_kind": "log.forked_log"}[rewrite]
    )


def test_a_checkpoint_of_a_brokers_log_that_is_not_shown(job: Job) -> None:
    job.publish()
    job.write(time.time())
    seen = open_checkpoint(read_checkpoint(job.log), LogPolicy((Log(job.key.verifier),)))
    result = job.audit(replace(job.trust, seen=[seen]), logs=0)
    assert faults(result) == [REFUSED]
    assert result.findings[0].text.startswith("log.wrong: ")


@pytest.mark.threat("A4")
def test_entries_signed_by_another_key_under_the_brokers_name(job: Job) -> None:
    job.publish()
    job.write(time.time())
    job.publish_instead(job.entries(), Signer.generate(job.key.name, SignatureKind.NOTE))
    assert faults(job.audit()) == [REFUSED]


def test_keys_that_are_out_by_a_machine_or_by_another_worker() -> None:
    history = BrokerHistory()
    joined = {"event": "joined", "job": JOB, "kind": "snp Milan"}
    for number, machine in enumerate(("a b", "c")):
        entry = {**joined, "number": number, "time": 1.0, "rank": number, "machine": machine}
        history.add(number, encode({**entry, "key": f"k{number}"}))
    history.add(2, encode({"number": 2, "time": 5.0, "event": "revoked", "machine": "b x"}))
    again = {**joined, "event": "joined again", "rank": 1, "machine": "d", "key": "k2"}
    history.add(3, encode({**again, "number": 3, "time": 6.0}))
    history.add(4, encode({**again, "event": "renewed", "number": 4, "time": 7.0}))
    assert history.out == {
        (JOB, "k0"): (5.0, "revoked"), (JOB, "k1"): (6.0, "another worker joined its rank"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    [
        b"", b"[]", b"{}", b'{"number":0,"time":1,"event":"joined"}',
        b'{"number":1,"time":1,"event":"x"}', b'{"number":0,"number":0,"time":1,"event":"x"}',
        b'{"number":0,"time":NaN,"event":"x"}', b'{"number":0,"time":"x","event":"x"}',
        b'{"number":0,"time":1,"event":"left","job":"j","rank":"0"}',
        b'{"number":0,"time":1,"event":"left","job":1,"rank":0}',
        b'{"number":0,"time":1,"event":"revoked","machine":1}', b"[" * 5000,
    ],
)  # fmt: skip
def test_what_no_broker_writes(entry: bytes) -> None:
    with pytest.raises(TamperedLog, match="entry 0 is not one that a broker writes"):
        BrokerHistory().add(0, entry)


def test_the_command(job: Job) -> None:
    job.publish()
    now = datetime.now(UTC)
    job.made.workers[1] = unlogged(job, Ed25519PrivateKey.generate(), timedelta(minutes=9), now)
    assert claims_in(job.made.workers[1].certificate) is not None
    job.write(time.time())
    pem, policy = job.folder / "ca.pem", job.folder / "broker.policy"
    pem.write_bytes(job.broker.place.keys.authority.public_bytes(Encoding.PEM))
    policy.write_text(f"log {job.key.verifier.encode()}\nquorum none\n")
    vkey = job.made.signer.verifier.encode()
    owner = job.folder / "owner.pub"
    owner.write_bytes(_public(job.made.owner))
    arguments = [
        "audit",
        "check",
        str(job.folder / "run"),
        "--authority",
        str(pem),
        "--policy",
        vkey,
    ]
    arguments += ["--job", JOB, "--owner", str(owner)]
    assert run_command(arguments)[0] == 0
    with pytest.raises(ConfigurationError, match="go together"):
        run_command([*arguments, "--broker-log", str(job.log)])
    given = ["--broker-log", str(job.log), "--broker-policy", str(policy)]
    status, text = run_command([*arguments, *given])
    assert status == 1
    assert "not-given" in text
    seen = job.folder / "seen"
    seen.write_bytes(read_checkpoint(job.log))
    job.publish_instead(cut(job.entries()))
    status, text = run_command([*arguments, *given, "--seen", str(seen)])
    assert status == 1
    assert "log.truncated_log" in text


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
