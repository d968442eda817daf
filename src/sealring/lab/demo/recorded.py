"""The demo's last act: a recorded run from a sealed vault, and what an audit makes of it.

The text is sealed in a vault. All workers train from it with signed records and save a checkpoint;
half of them load it and go on, as a run of their own. Then the same again with one rank that signs
another count of its all-reduces. The audit checks each folder as a stranger would.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.core.identity import load_credentials
from sealring.formats.log.notes import Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.lab.bench.workers import Report, run_workers
from sealring.record.audit.audit import audit
from sealring.record.audit.page import Beside, write_page
from sealring.record.audit.records import AuditTrust

TEXT: Final = "corpus"
CHECKPOINT: Final = "model"
STEPS: Final = 8
EVERY: Final = 4
_JOB: Final = "local"

Name = Literal["honest", "resumed", "lying"]


@dataclass(frozen=True, slots=True)
class Plan:
    folder: str
    """Of the run's records."""
    vault: str
    key: str
    resumes: bool
    lies: bool
    digest: str
    """Of the text."""


@dataclass(frozen=True, slots=True)
class Audited:
    """A run, and what the audit says of it."""

    name: Name
    ranks: int
    status: int
    """What `sealring audit check` would exit with."""
    findings: list[str]
    page: Path


def perform_recorded(ranks: int, place: Path, costs: Beside) -> Generator[str | Audited]:
    """Yields what is being done, and the outcome of each audit. Everything is kept in `place`.

    `costs` are shown on each page.
    """
    from sealring.lab.demo.train import standard_library
    from sealring.vault.keys import key_file, make_key_file
    from sealring.vault.trees import seal_path
    from sealring.vault.vault import Vault

    yield "sealing the text into a vault"
    text = standard_library(1 << 20)
    make_key_file(place / "vault.key")
    vault = Vault.create(place / "vault", key_file(place / "vault.key"), "owner")
    with tempfile.TemporaryDirectory(dir=place) as plain:
        path = Path(plain) / TEXT
        path.write_bytes(text)
        seal_path(vault, path, TEXT, None, lambda _: None)
    digest = hashlib.sha256(text).hexdigest()
    environment = {"SEALRING_SECRET": secrets.token_hex(32), "SEALRING_JOB": _JOB}
    (authority,) = load_credentials(0, ranks, environment).authorities
    (place / "authority.pem").write_bytes(authority.public_bytes(Encoding.PEM))
    # Two ranks that contradict each other could both be lying: the third one decides.
    fewer = max(2, ranks // 2)
    runs: list[tuple[Name, int]] = [("honest", ranks), ("resumed", fewer), ("lying", 3)]
    for name, count in runs:
        yield f"a recorded run with {count} workers ({name})"
        folder = place / name
        plan = Plan(
            str(folder), str(vault.path), str(place / "vault.key"),
            resumes=name == "resumed", lies=name == "lying", digest=digest,
        )  # fmt: skip
        for _ in run_workers(count, _work, plan, environment=environment):
            pass
        yield f"the audit of it ({name})"
        result = audit(folder, _trust(folder, authority))
        page = place / f"{name}.html"
        write_page(page, result, costs)
        findings = [f"{' or '.join(one.parties)}: {one.text}" for one in result.findings]
        yield Audited(name, count, result.status.value, findings, page)


def _trust(folder: Path, authority: x509.Certificate) -> AuditTrust:
    """The two keys that an auditor must have: of the certificates, and of the run's log."""
    vkey = folder.with_name(f"{folder.name}.vkey").read_text().strip()
    return AuditTrust([authority], LogPolicy((Log(Verifier.parse(vkey)),)))


def surprises(audited: list[Audited]) -> list[str]:
    """What the audits did not say as they should; empty if all is well."""
    found = []
    for one in audited:
        named = any(finding.startswith("rank 1") for finding in one.findings)
        if one.name == "lying" and not (one.status == 1 and named):
            found.append(f"the audit did not name the rank that lied, but said {one.findings}")
        if one.name != "lying" and one.status != 0:
            found.append(f"the audit of the {one.name} run says {one.findings}")
    return found


# ---- in the workers


def _work(rank: int, report: Report, plan: Plan) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from sealring.lab.bench.models import Shape, make_model
    from sealring.lab.demo.train import SEED, Batches, Trainee
    from sealring.record import Share, note_data
    from sealring.record.recording.run import record_run
    from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file

    vault = Vault.open(Path(plan.vault), key_file(Path(plan.key)))
    shape = Shape(layers=1, width=32, heads=2, context=32)
    batches = Batches(_opened(vault), context=shape.context, size=2, seed=SEED + rank)
    dist.init_process_group("sealring")
    world = dist.get_world_size()
    trainee = Trainee.of(make_model(shape, SEED))
    if plan.lies and rank == 1:
        _lie()
    with record_run(plan.folder, every=EVERY, rank=rank, world=world) as records:
        if plan.resumes:
            state = {"model": trainee.model.state_dict()}
            dcp.load(state, storage_reader=CheckpointReader(vault, CHECKPOINT))
            trainee.model.load_state_dict(state["model"])
        for step in records.steps(STEPS):
            trainee.step(batches.draw())
            first = step * world * 2
            share = Share(world * 2, rank * 2, 2)
            note_data(TEXT, plan.digest, 0, first, first + world * 2, seed=SEED, share=share)
        dcp.save(
            {"model": trainee.model.state_dict()},
            storage_writer=CheckpointWriter(vault, CHECKPOINT),
        )
        dist.destroy_process_group()
    report(None)


def _opened(vault: Any) -> bytes:
    """The text, which no disk holds in plaintext."""
    stored = vault.find(TEXT)
    (part,) = stored.manifest.parts
    with stored.copy.opened(part, stored.whose) as reader:
        text = bytearray(reader.length)
        reader.read_into(0, text)
    return bytes(text)


def _lie() -> None:
    """From now on this rank says that it has done one collective more than it did."""
    from sealring.record.recording import run

    recording: Any = run
    honest = recording.traffic_so_far

    def lying() -> Any:
        found = honest()
        found.collectives = [replace(one, count=one.count + 1) for one in found.collectives]
        return found

    recording.traffic_so_far = lying
