"""Measures what records of a run cost: statements during training, audits, and the log.

`python -m sealring.lab provenance` trains one model with and without signed statements, in turn. A
block has as many steps as an interval. A recorded block ends when its statement is on disk and, on
rank 0, when all ranks' statements are in the log. Then it audits made-up runs and opens their
pages. `python -m sealring.lab log` appends, proves, checks and cosigns on a real disk with real
fsyncs, so the result depends on the disk of the folder.
"""

from __future__ import annotations

import hashlib
import random
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName
from sealring.errors import WorkerFailed
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import LogProof, Submission
from sealring.formats.log.folder import LogWriter, StoredTree, create_log
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from sealring.lab.bench.harness import (
    BenchRow,
    Timings,
    compare,
    in_turn,
    reports_of,
    sealed_world,
    seconds_of,
)
from sealring.lab.bench.step import BenchTrainee, StepSetting
from sealring.lab.bench.workers import CPU, Report
from sealring.record.audit.audit import Status, audit
from sealring.record.audit.page import write_page
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.forms import (
    CheckpointRef,
    Code,
    CollectiveCount,
    Commitment,
    DataRange,
    GroupEpoch,
    Interval,
    LinkAccount,
    Named,
    Share,
)
from sealring.record.statements.run_folder import RunFolder, create_run, open_run
from sealring.record.statements.signing import sign_statement, statement_digest

# ---- the records of a run that did not take place, for audits of any size
# The statements are signed by the functions that workers call. Instead of the engine's hashes they
# have made-up ones, which are equal at both ends of a link and change after each record.


JOB: Final = "job"
RUN: Final = "run-1"
NOW: Final = datetime(2026, 11, 1, 12, tzinfo=UTC)
START: Final = int(NOW.timestamp())
STEPS: Final = 10
"""Steps in each interval."""
SAMPLES: Final = 2
"""Samples of each rank in each step."""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SCRIPT: Final = Named("train.py", sha("train.py"))
CORPUS: Final = Named("corpus", sha("corpus"))


class Authority:
    """Issues certificates that were valid at `NOW`."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        long = timedelta(days=9)
        self.certificate = make_authority(self.key, "made run", 1, NOW - long, NOW + long)

    def worker(
        self, rank: int, world: int | None, job: str = JOB, now: datetime = NOW, hours: float = 24,
        attestation: bytes | None = None, key: Ed25519PrivateKey | None = None,
    ) -> Credentials:  # fmt: skip
        key = key or Ed25519PrivateKey.generate()
        certificate = issue(
            self.certificate, self.key, key.public_key(), WorkerName(job, rank), world,
            timedelta(hours=hours), now, attestation=attestation,
        )  # fmt: skip
        return Credentials(job, rank, certificate, (self.certificate,), KeptKey.of(key))


def commitment(sender: int, receiver: int, records: int) -> Commitment:
    return Commitment(records, sha(f"{sender}>{receiver}:{records}"))


def checkpoint(step: int) -> CheckpointRef:
    return CheckpointRef(f"model@{step}", step, sha(f"manifest {step}"), sha(f"content {step}"))


def interval(rank: int, world: int, sequence: int, last: int) -> Interval:
    """A rank's statement of one interval, at whose end a checkpoint is written."""
    done = (sequence + 1) * STEPS
    batch = world * SAMPLES
    share = Share(batch, rank * SAMPLES, SAMPLES)
    first, end = sequence * STEPS * batch, done * batch
    return Interval(
        run=RUN, sequence=sequence, previous=None if sequence == 0 else "00" * 32,
        final=sequence == last, world=world, first_step=sequence * STEPS, end_step=done,
        started=START + 10 * sequence, finished=START + 10 * sequence + 9,
        code=Code(SCRIPT, sha("packages"), "0.1.0", "3.11", "2.13.0", None),
        configuration=sha("configuration"),
        data=[DataRange("corpus", CORPUS.sha256, 0, first, end, 7, share)],
        groups=[GroupEpoch("0", "e1", list(range(world)), "open")],
        collectives=[CollectiveCount("0", "e1", "all_reduce", done)],
        links=[
            LinkAccount(
                "0", "e1", peer, "collective", commitment(rank, peer, 3 * done),
                commitment(peer, rank, 3 * done),
            )
            for peer in range(world)
            if peer != rank
        ],
        checkpoints_in=[],
        checkpoints_out=[checkpoint(done)],
        privacy=None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HonestRun:
    authority: Authority
    world: int
    intervals: int

    def envelopes(self) -> Iterator[tuple[str, bytes]]:
        """Yields (name, envelope), interval by interval."""
        workers = [self.authority.worker(rank, self.world) for rank in range(self.world)]
        previous: dict[int, str] = {}
        for sequence in range(self.intervals):
            for rank, worker in enumerate(workers):
                one = interval(rank, self.world, sequence, self.intervals - 1)
                stated = replace(one, previous=previous[rank]) if sequence else one
                envelope = sign_statement(stated, worker)
                previous[rank] = statement_digest(envelope)
                yield f"rank-{rank}-{sequence}", envelope


def write_statements(
    path: Path, envelopes: Iterator[tuple[str, bytes]]
) -> tuple[RunFolder, list[bytes]]:
    """Writes a run's folder without its log; returns it and the log's entries. Does not fsync."""
    run = create_run(path, run=RUN, job=JOB)
    (path / "statements").mkdir()
    entries = []
    for name, envelope in envelopes:
        run.statement_path(name).write_bytes(envelope)
        entries.append(envelope)
    return run, entries


BAR: Final = 1.01
"""The target: a step with records takes at most this many times as long as one without."""


@dataclass(frozen=True, slots=True)
class RecordingWork:
    model: str
    ranks: int
    batch: int
    every: int
    blocks: int
    folder: str


def measure_recording(
    model: str,
    *,
    ranks: int,
    batch: int,
    every: int,
    blocks: int,
    folder: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[BenchRow]:
    """Measures training; the statements are written to a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-records-", dir=folder) as made:
        run = Path(made) / "run"
        work = RecordingWork(model, ranks, batch, every, blocks, str(run))
        (samples,) = reports_of(ranks, _worker, work, progress=progress)
        recorded, unrecorded = samples["recorded"], samples["unrecorded"]
        compared = compare(recorded.seconds, unrecorded.seconds)
        sizes = [len(envelope) for _, envelope in open_run(run).statements()]
        on_disk = _size_of(run)
    ratio, low, high = (round(each, 4) for each in (compared.ratio, compared.low, compared.high))
    return [
        BenchRow("step", f"step with a statement every {every}", _ms(recorded), "ms"),
        BenchRow("step", "step without", _ms(unrecorded), "ms"),
        BenchRow("step", "ratio", ratio, "x", at_most=BAR, low=low, high=high),
        BenchRow("step", "statements", len(sizes), ""),
        BenchRow("step", "of a rank and interval", round(sum(sizes) / len(sizes), 1), "bytes"),
        BenchRow("step", "statements, log and evidence", on_disk, "bytes"),
    ]


def _ms(samples: Timings) -> float:
    return round(samples.median * 1e3, 2)


# ---- in the workers


def _worker(rank: int, report: Report, work: RecordingWork) -> None:
    from sealring.record import note_data
    from sealring.record.recording.run import record_run

    with sealed_world() as group:
        trainee = BenchTrainee(
            "sealed",
            StepSetting(work.model, work.batch, "fp32", 25.0),
            rank=rank,
            device=CPU.enter(rank, work.ranks),
            sealed=group,
        )
        with record_run(work.folder, every=work.every, rank=rank, world=work.ranks) as records:

            def recorded_block() -> None:
                for _ in range(work.every):
                    trainee.step()
                    first = records.next_step * work.batch
                    note_data("synthetic", "00" * 32, 0, first, first + work.batch)
                    records.step()
                records.wait()

            def unrecorded_block() -> None:
                for _ in range(work.every):
                    trainee.step()

            blocks = {"recorded": recorded_block, "unrecorded": unrecorded_block}
            samples = in_turn(blocks, report, blocks=work.blocks)
        if rank == 0:
            report(
                {
                    name: Timings(tuple(second / work.every for second in each.seconds))
                    for name, each in samples.items()
                }
            )


# ---- audits: checking records, writing the page, opening it in a browser


BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE_SECONDS: Final = 120
_OPENED: Final = re.compile(r'<html[^>]* data-opened="(\d+)"')


def measure_audit(ranks: int, intervals: int, folder: Path | None = None) -> list[BenchRow]:
    """Audits an honest run of that size, in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-audit-", dir=folder) as made:
        return _audited(Path(made), ranks, intervals)


def _audited(folder: Path, ranks: int, intervals: int) -> list[BenchRow]:
    authority = Authority()
    signer = Signer.generate("bench.sealring/run", SignatureKind.NOTE)
    run, entries = write_statements(
        folder / "run", HonestRun(authority, ranks, intervals).envelopes()
    )
    create_log(run.log, signer)
    with LogWriter(run.log, signer) as writer:
        writer.append(entries)
    trust = AuditTrust([authority.certificate], LogPolicy((Log(signer.verifier),)))
    before = time.process_time()
    start = time.perf_counter()
    result = audit(run.path, trust)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    if result.status is not Status.SHOWN:
        raise WorkerFailed(f"the audit of an honest run found: {result.findings[:1]}")
    page = folder / "page.html"
    written = seconds_of(lambda: write_page(page, result))
    run_size = f"{ranks} ranks, {intervals} intervals"
    figures: list[tuple[str, float | None, str]] = [
        ("statements", len(entries), ""),
        ("of a statement", round(sum(map(len, entries)) / len(entries)), "bytes"),
        ("the whole audit: log, signatures, contradictions, graph", round(seconds, 3), "s"),
        ("of this process alone", round(cpu, 3), "s"),
        ("writing the page", round(written, 3), "s"),
        ("the page", page.stat().st_size, "bytes"),
        ("from navigation to a page laid out", _opened(page), "ms"),
    ]
    return [
        BenchRow("audit", f"{run_size}: {what}", value, unit)
        for what, value, unit in figures
        if value is not None  # there is no browser here
    ]


def _opened(page: Path) -> float | None:
    """The milliseconds that the page took to open, by its own measure; None without a browser.

    The start of the browser does not count.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-extensions", "--disable-background-networking",
                "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    opened = _OPENED.search(done.stdout)
    if opened is None:
        raise WorkerFailed(f"{browser} did not open the page: {done.stderr[-500:]}")
    return float(opened[1])


# ---- a transparency log


ENTRY_BYTES: Final = 200
_PROOFS: Final = 2000
_COMMITS: Final = 50
_BATCH: Final = 256


def measure_log(entries: int, folder: Path | None = None) -> list[BenchRow]:
    """Measures a log of this size, in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-log-", dir=folder) as made:
        return _measure(Path(made), entries)


def _measure(folder: Path, count: int) -> list[BenchRow]:
    signer = Signer.generate("bench.sealring/log", SignatureKind.NOTE)
    log = folder / "log"
    create_log(log, signer)
    with LogWriter(log, signer, folder / "signed") as writer:
        append = count / seconds_of(lambda: writer.append(_entries(0, count)))
        batches = seconds_of(lambda: [writer.append(_entries(n, _BATCH)) for n in range(_COMMITS)])
        sizes = []

        def one_by_one() -> None:
            for number in range(_COMMITS):
                writer.append(_entries(number, 1))
                sizes.append(writer.checkpoint)

        commits = seconds_of(one_by_one)
        signed, stored = writer.checkpoint, writer.stored
        chosen = random.Random(1)  # noqa: S311 - the same entries in every run
        picked = [chosen.randrange(signed.size) for _ in range(_PROOFS)]
        proofs: list[list[bytes]] = []
        made = seconds_of(
            lambda: proofs.extend(stored.inclusion_proof(index, signed.root) for index in picked)
        )
        consistent = seconds_of(
            lambda: [stored.consistency_proof(index + 1, signed.root) for index in picked]
        )
        leaves = [stored.subtree(0, index) for index in picked]

        def check_proofs() -> None:
            for index, leaf, proof in zip(picked, leaves, proofs, strict=True):
                tree.check_inclusion(index, signed.size, leaf, proof, signed.root)

        checked = seconds_of(check_proofs)
        verify = seconds_of(lambda: StoredTree(log, signed.size).check_all(signed.root))
        submissions = [
            Submission(
                before.size,
                tuple(StoredTree(log, after.size).consistency_proof(before.size, after.root)[1]),
                after.note.encode(),
            ).encode()
            for before, after in pairwise(sizes)
        ]
        first = Submission(0, (), sizes[0].note.encode()).encode()
        witness = _witness_seconds(folder, signer, first, submissions)
    rates = {
        "entries appended, one commit": append,
        "entries appended, commits of 256": _COMMITS * _BATCH / batches,
        "commits of one entry": _COMMITS / commits,
        "inclusion proofs made from disk, and checked": _PROOFS / made,
        "consistency proofs made from disk, and checked": _PROOFS / consistent,
        "inclusion proofs checked": _PROOFS / checked,
        "entries verified, whole log": signed.size / verify,
        "checkpoints cosigned by one witness": len(submissions) / witness,
    }
    proof = LogProof(picked[0], tuple(proofs[0]), signed.note.encode()).encode()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        BenchRow("log", f"entries of {ENTRY_BYTES} bytes", signed.size, ""),
        *(BenchRow("log", what, round(rate, 1), "a second") for what, rate in rates.items()),
        BenchRow("log", "a proof, without cosignatures", len(proof), "bytes"),
        BenchRow("log", "on the disk", _size_of(log), "bytes"),
        BenchRow("log", "of this process, at most", round(peak, 1), "MiB"),
    ]


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _witness_seconds(folder: Path, log: Signer, first: bytes, submissions: list[bytes]) -> float:
    from sealring.record.witness import WitnessState

    key = Signer.generate("bench.sealring/witness", SignatureKind.COSIGNATURE)
    policy = LogPolicy((Log(log.verifier),))
    with WitnessState(folder / "witness", key, policy) as state:
        state.add_checkpoint(first)
        return seconds_of(lambda: [state.add_checkpoint(each) for each in submissions])


def _entries(first: int, count: int) -> Iterator[bytes]:
    for number in range(first, first + count):
        yield number.to_bytes(8, "big") * (ENTRY_BYTES // 8)
