"""What records of a run cost: statements while it trains, audits of it, and its transparency log.

`python -m sealring.lab provenance` trains one model with and without signed statements, in turn,
in blocks of as many steps as an interval has; a recorded block ends when its statement is on the
disk and, on rank 0, every rank's is in the log. Then it audits made runs and opens their pages.
`python -m sealring.lab log` appends, proves, checks and cosigns on a real disk with real fsyncs,
so the folder decides much of the result.
"""

from __future__ import annotations

import random
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from sealring.errors import WorkerFailed
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import LogProof, Submission
from sealring.formats.log.folder import LogWriter, StoredTree, create_log
from sealring.formats.log.notes import Kind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from sealring.lab.bench.harness import (
    Samples,
    compare,
    in_turn,
    reports_of,
    sealed_world,
    seconds_of,
)
from sealring.lab.bench.made_run import Authority, HonestRun, write_statements
from sealring.lab.bench.step import Setting, Trainee
from sealring.lab.bench.workers import CPU, Report
from sealring.record.audit.audit import Status, audit
from sealring.record.audit.page import write_page
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.run_folder import open_run

BAR: Final = 1.01
"""A step with records takes at most this many times one without."""


@dataclass(frozen=True, slots=True)
class Work:
    model: str
    ranks: int
    batch: int
    every: int
    blocks: int
    folder: str


@dataclass(frozen=True, slots=True)
class RecordingCost:
    model: str
    ranks: int
    every: int
    recorded_ms: float
    """A step, the median over blocks."""
    unrecorded_ms: float
    ratio: float
    told: float | None
    """The same, or None where it cannot be told from the noise."""
    noise: float
    bar: float
    statements: int
    bytes_per_statement: float
    """Of one rank and interval, with signature and certificate."""
    disk_bytes: int
    """Of the whole folder: statements, log and evidence."""


def measure_recording(
    model: str,
    *,
    ranks: int,
    batch: int,
    every: int,
    blocks: int,
    folder: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> RecordingCost:
    """Trains in a temporary folder inside `folder`, on whose disk the statements go."""
    with tempfile.TemporaryDirectory(prefix="sealring-records-", dir=folder) as made:
        run = Path(made) / "run"
        work = Work(model, ranks, batch, every, blocks, str(run))
        (samples,) = reports_of(ranks, _worker, work, progress=progress)
        recorded, unrecorded = samples["recorded"], samples["unrecorded"]
        compared = compare(recorded.seconds, unrecorded.seconds)
        sizes = [len(envelope) for _, envelope in open_run(run).statements()]
        on_disk = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    return RecordingCost(
        model=model,
        ranks=ranks,
        every=every,
        recorded_ms=round(recorded.median * 1e3, 2),
        unrecorded_ms=round(unrecorded.median * 1e3, 2),
        ratio=round(recorded.median / unrecorded.median, 4),
        told=compared.told and round(compared.told, 4),
        noise=round(compared.noise, 4),
        bar=BAR,
        statements=len(sizes),
        bytes_per_statement=round(sum(sizes) / len(sizes), 1),
        disk_bytes=on_disk,
    )


# ---- in the workers


def _worker(rank: int, report: Report, work: Work) -> None:
    from sealring.record import note_data
    from sealring.record.recording.run import record_run

    with sealed_world() as group:
        trainee = Trainee(
            "sealed",
            Setting(work.model, work.batch, "fp32", 25.0),
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
                    name: Samples(tuple(second / work.every for second in each.seconds))
                    for name, each in samples.items()
                }
            )


# ---- audits: checking records, writing the page, opening it in a browser


BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE_SECONDS: Final = 120
_OPENED: Final = re.compile(r'<html[^>]* data-opened="(\d+)"')


@dataclass(frozen=True, slots=True)
class AuditCost:
    ranks: int
    intervals: int
    statements: int
    statement_bytes: int
    """On average."""
    seconds: float
    """The whole audit: log, signatures, contradictions, graph."""
    cpu_seconds: float
    """The same without the time that other processes took."""
    page_seconds: float
    page_bytes: int
    opened_ms: float | None
    """From the start of navigation until the page was laid out and its script had run; None: there
    is no browser here."""


def measure_audit(ranks: int, intervals: int, folder: Path | None = None) -> AuditCost:
    """An honest run of that size, in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-audit-", dir=folder) as made:
        return _audited(Path(made), ranks, intervals)


def _audited(folder: Path, ranks: int, intervals: int) -> AuditCost:
    authority = Authority()
    signer = Signer.generate("bench.sealring/run", Kind.NOTE)
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
    return AuditCost(
        ranks=ranks,
        intervals=intervals,
        statements=len(entries),
        statement_bytes=round(sum(map(len, entries)) / len(entries)),
        seconds=round(seconds, 3),
        cpu_seconds=round(cpu, 3),
        page_seconds=round(written, 3),
        page_bytes=page.stat().st_size,
        opened_ms=_opened(page),
    )


def _opened(page: Path) -> float | None:
    """The page tells itself how long it took; the browser's own start does not count."""
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


@dataclass(frozen=True, slots=True)
class LogResult:
    entries: int
    append_per_s: float
    """Entries a second, all in one commit."""
    batch_per_s: float
    """Entries a second in commits of 256."""
    commits_per_s: float
    """Commits of one entry a second."""
    inclusion_proofs_per_s: float
    """Made from tiles on disk for random entries, and checked against the root."""
    consistency_proofs_per_s: float
    checked_proofs_per_s: float
    """Inclusion proofs checked by a reader who has no tiles."""
    verify_per_s: float
    """Entries a second when the whole log is read and checked."""
    witness_per_s: float
    """Submissions a second that one witness checks, writes to its disk and cosigns."""
    proof_bytes: int
    """Of one tlog-proof file, without cosignatures."""
    disk_bytes: int
    peak_memory_mib: float
    """Of this process, after all of it."""


def measure_log(entries: int, folder: Path | None = None) -> LogResult:
    """A log of this size in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-log-", dir=folder) as made:
        return _measure(Path(made), entries)


def _measure(folder: Path, count: int) -> LogResult:
    signer = Signer.generate("bench.sealring/log", Kind.NOTE)
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
    return LogResult(
        entries=signed.size,
        append_per_s=round(append),
        batch_per_s=round(_COMMITS * _BATCH / batches),
        commits_per_s=round(_COMMITS / commits, 1),
        inclusion_proofs_per_s=round(_PROOFS / made),
        consistency_proofs_per_s=round(_PROOFS / consistent),
        checked_proofs_per_s=round(_PROOFS / checked),
        verify_per_s=round(signed.size / verify),
        witness_per_s=round(len(submissions) / witness, 1),
        proof_bytes=len(LogProof(picked[0], tuple(proofs[0]), signed.note.encode()).encode()),
        disk_bytes=sum(path.stat().st_size for path in log.rglob("*") if path.is_file()),
        peak_memory_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    )


def _witness_seconds(folder: Path, log: Signer, first: bytes, submissions: list[bytes]) -> float:
    from sealring.record.witness import WitnessState

    key = Signer.generate("bench.sealring/witness", Kind.COSIGNATURE)
    policy = LogPolicy((Log(log.verifier),))
    with WitnessState(folder / "witness", key, policy) as state:
        state.add_checkpoint(first)
        return seconds_of(lambda: [state.add_checkpoint(each) for each in submissions])


def _entries(first: int, count: int) -> Iterator[bytes]:
    for number in range(first, first + count):
        yield number.to_bytes(8, "big") * (ENTRY_BYTES // 8)
