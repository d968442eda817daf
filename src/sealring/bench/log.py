"""What a transparency log costs: appends, proofs, a check of the whole, and a witness's answers.

Everything is on a real disk with real fsyncs, so the folder decides much of the result.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from sealring.formats.log import tree
from sealring.formats.log.checkpoints import LogProof, Submission
from sealring.formats.log.folder import LogWriter, StoredTree, create_log
from sealring.formats.log.notes import Kind, Signer
from sealring.formats.log.policy import Log, LogPolicy

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_log(entries: int, folder: Path | None = None) -> LogResult:
    """A log of this size in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-log-", dir=folder) as made:
        return _measure(Path(made), entries)


def _measure(folder: Path, count: int) -> LogResult:
    signer = Signer.generate("bench.sealring/log", Kind.NOTE)
    log = folder / "log"
    create_log(log, signer)
    with LogWriter(log, signer, folder / "signed") as writer:
        append = count / _seconds(lambda: writer.append(_entries(0, count)))
        batches = _seconds(lambda: [writer.append(_entries(n, _BATCH)) for n in range(_COMMITS)])
        sizes = []

        def one_by_one() -> None:
            for number in range(_COMMITS):
                writer.append(_entries(number, 1))
                sizes.append(writer.checkpoint)

        commits = _seconds(one_by_one)
        signed, stored = writer.checkpoint, writer.stored
        chosen = random.Random(1)  # noqa: S311 - the same entries in every run
        picked = [chosen.randrange(signed.size) for _ in range(_PROOFS)]
        proofs: list[list[bytes]] = []
        made = _seconds(
            lambda: proofs.extend(stored.inclusion_proof(index, signed.root) for index in picked)
        )
        consistent = _seconds(
            lambda: [stored.consistency_proof(index + 1, signed.root) for index in picked]
        )
        leaves = [stored.subtree(0, index) for index in picked]

        def check_proofs() -> None:
            for index, leaf, proof in zip(picked, leaves, proofs, strict=True):
                tree.check_inclusion(index, signed.size, leaf, proof, signed.root)

        checked = _seconds(check_proofs)
        verify = _seconds(lambda: StoredTree(log, signed.size).check_all(signed.root))
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
    from sealring.witness.state import WitnessState

    key = Signer.generate("bench.sealring/witness", Kind.COSIGNATURE)
    policy = LogPolicy((Log(log.verifier),))
    with WitnessState(folder / "witness", key, policy) as state:
        state.add_checkpoint(first)
        return _seconds(lambda: [state.add_checkpoint(each) for each in submissions])


def _entries(first: int, count: int) -> Iterator[bytes]:
    for number in range(first, first + count):
        yield number.to_bytes(8, "big") * (ENTRY_BYTES // 8)


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
