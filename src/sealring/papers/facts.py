"""What a run's statements say, summed up. All of them were verified; none is more than a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sealring.errors import MalformedRun
from sealring.provenance.digests import Named
from sealring.provenance.intervals import Attestation, CheckpointRef, Code, Interval, Privacy
from sealring.provenance.runs import RunFolder
from sealring.provenance.statements import verify_statement
from sealring.provenance.transformations import Transformation


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class RunFacts:
    run: str
    job: str
    authority: str
    """SHA-256 of the certificate that the workers' were issued by."""
    world: int
    steps: int
    started: int
    finished: int
    complete: bool
    """Every rank's chain has a final statement."""
    statements: int
    code: Code
    packages: bytes
    configuration: str
    datasets: tuple[Named, ...]
    checkpoints: tuple[CheckpointRef, ...]
    attestations: tuple[Attestation, ...]
    privacy: Privacy | None
    transformations: tuple[Transformation, ...]
    envelopes: tuple[bytes, ...]
    """Of the transformations, as they were signed."""

    def export_of(self, digest: str) -> tuple[Transformation, bytes]:
        """The export that wrote a file with this digest, and its envelope."""
        for one, envelope in zip(self.transformations, self.envelopes, strict=True):
            if one.kind == "export" and any(digest == made.sha256 for made in one.outputs):
                return one, envelope
        raise MalformedRun(
            f"no export of run {self.run} wrote a file with the SHA-256 {digest}: export with "
            "`sealring vault export --record RUN`, and give the file as it was written"
        )


def facts_of(
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    owners: Sequence[Ed25519PublicKey],
) -> RunFacts:
    intervals: list[tuple[int, Interval]] = []
    transformations: list[tuple[Transformation, bytes]] = []
    attestations: dict[Attestation, None] = {}
    for _, envelope in run.statements():
        found = verify_statement(envelope, authorities, owners=owners)
        if isinstance(found.content, Transformation):
            transformations.append((found.content, envelope))
        elif found.worker is not None:
            intervals.append((found.worker.rank, found.content))
            if found.worker.attestation is not None:
                attestations[found.worker.attestation] = None
    if not intervals:
        raise MalformedRun(f"{run.path} has no statement of a worker")
    contents = [interval for _, interval in intervals]
    last = max(contents, key=lambda one: (one.end_step, one.finished))
    finals = {rank for rank, interval in intervals if interval.final}
    return RunFacts(
        run=run.head.run,
        job=run.head.job,
        authority=authorities[0].fingerprint(hashes.SHA256()).hex(),
        world=last.world,
        steps=last.end_step,
        started=min(one.started for one in contents),
        finished=max(one.finished for one in contents),
        complete=finals >= set(range(last.world)),
        statements=len(intervals) + len(transformations),
        code=last.code,
        packages=run.evidence(last.code.packages) or b"",
        configuration=last.configuration,
        datasets=tuple(
            dict.fromkeys(Named(part.name, part.sha256) for one in contents for part in one.data)
        ),
        checkpoints=tuple(part for one in contents for part in one.checkpoints_out),
        attestations=tuple(attestations),
        privacy=next((one.privacy for one in reversed(contents) if one.privacy), None),
        transformations=tuple(one for one, _ in transformations),
        envelopes=tuple(envelope for _, envelope in transformations),
    )
