"""Writes a model's papers into one folder beside it, from the records of its run.

model.sig           a bundle of OpenSSF model signing, over all files of the model
export.dsse.json    the record of the export
slsa.dsse.json      SLSA provenance, for the same root digest as the bundle
README.md           the model card
model.cdx.json      the bill of materials
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sealring.core.identity.process import read_secret_file
from sealring.core.identity.verification import is_issued_by
from sealring.errors import ConfigurationError, MalformedRun
from sealring.formats.files import not_written, write_public
from sealring.formats.signed import seal_envelope
from sealring.formats.strict import read_json
from sealring.record.statements.forms import (
    Attestation,
    CheckpointRef,
    Code,
    Interval,
    Named,
    Privacy,
    Transformation,
    as_subject,
    digest_of_file,
)
from sealring.record.statements.run_folder import RunFolder, check_folder
from sealring.record.statements.signing import STATEMENT_TYPE, of_another_run, verify_statement
from sealring.version import __version__

# ---- a summary of a run's statements: all were verified, but they are only what signers state


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class RunFacts:
    run: str
    job: str
    authority: str
    """SHA-256 of the certificate of the authority that issued the workers' certificates."""
    world: int
    steps: int
    started: int
    finished: int
    complete: bool
    """Whether every rank's chain ends with a final statement."""
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
    """The envelopes of the transformations, as they were signed."""

    def export_of(self, digest: str) -> tuple[Transformation, bytes]:
        """The export that wrote a file with this digest, and its envelope.

        An owner's record names no run, so only its inputs show whether it belongs to this one.
        """
        written = {one.sha256 for one in self.checkpoints}
        strange = ""
        for one, envelope in zip(self.transformations, self.envelopes, strict=True):
            if one.kind != "export" or all(digest != made.sha256 for made in one.outputs):
                continue
            others = [source.name for source in one.inputs if source.sha256 not in written]
            if one.inputs and not others:
                return one, envelope
            strange = others[0] if others else "nothing"
        if strange:
            raise MalformedRun(
                f"the file with the SHA-256 {digest} was exported from {strange[:200]!r}, which no "
                f"rank of run {self.run} wrote: it is another run's"
            )
        raise MalformedRun(
            f"no export of run {self.run} wrote a file with the SHA-256 {digest}: export with "
            "`sealring vault open --record RUN`, and give the file as it was written"
        )


def facts_of(
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    owners: Sequence[Ed25519PublicKey],
    job: str | None = None,
) -> RunFacts:
    """Sums up a run. MalformedRun if the folder or a chain is damaged, or it is another job's."""
    check_folder(run.path)
    if job is not None and run.head.job != job:
        raise MalformedRun(
            f"{run.path} is of job {run.head.job}, and not of {job}: its workers were not admitted "
            "to that job, whatever they say of its model"
        )
    intervals: list[tuple[int, Interval]] = []
    chains: dict[int, list[tuple[Interval, str]]] = {}
    transformations: list[tuple[Transformation, bytes]] = []
    attestations: dict[Attestation, None] = {}
    issuers: dict[x509.Certificate, None] = {}
    statements = 0
    for name, envelope in run.statements():
        found = verify_statement(envelope, authorities, owners=owners)
        if strange := of_another_run(found, run.head.run, run.head.job):
            raise MalformedRun(
                f"{name} is {strange}, and {run.path} is of run {run.head.run} of job "
                f"{run.head.job}: remove it, or ask `sealring audit check` who put it there"
            )
        statements += 1
        if isinstance(found.content, Transformation):
            if found.worker is None:  # a worker could pass any file off as an export
                transformations.append((found.content, envelope))
        elif found.worker is not None:
            intervals.append((found.worker.rank, found.content))
            chains.setdefault(found.worker.rank, []).append((found.content, found.digest))
            if found.worker.attestation is not None:
                attestations[found.worker.attestation] = None
            if found.certificate is not None:
                issuers[_issuer(found.certificate, authorities)] = None
    if not intervals:
        raise MalformedRun(f"{run.path} has no statement of a worker")
    for rank, chain in chains.items():
        _require_unbroken(rank, chain)
    (authority, *others) = issuers
    if others:
        raise MalformedRun(
            f"the workers of {run.path} have certificates of {len(issuers)} authorities, and "
            "papers name the one that built the model: give the authority of this run alone"
        )
    contents = [interval for _, interval in intervals]
    last = max(contents, key=lambda one: (one.end_step, one.finished))
    packages = run.evidence(last.code.packages)
    if packages is None:
        raise MalformedRun(
            f"{run.path} has no list of the packages that ran ({last.code.packages}): restore it "
            "in evidence/, a bill of materials without it would name none"
        )
    return RunFacts(
        run=run.head.run,
        job=run.head.job,
        authority=authority.fingerprint(hashes.SHA256()).hex(),
        world=last.world,
        steps=last.end_step,
        started=min(one.started for one in contents),
        finished=max(one.finished for one in contents),
        complete=all(_has_end(chains.get(rank, [])) for rank in range(last.world)),
        statements=statements,
        code=last.code,
        packages=packages,
        configuration=last.configuration,
        datasets=tuple(
            dict.fromkeys(Named(part.name, part.sha256) for one in contents for part in one.data)
        ),
        checkpoints=tuple(part for one in contents for part in one.checkpoints_out),
        attestations=tuple(attestations),
        privacy=max((one.privacy for one in contents if one.privacy), key=_spent, default=None),
        transformations=tuple(one for one, _ in transformations),
        envelopes=tuple(envelope for _, envelope in transformations),
    )


def _issuer(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate]
) -> x509.Certificate:
    """The one of these authorities that signed the certificate."""
    return next(one for one in authorities if is_issued_by(certificate, (one,)))


def _require_unbroken(rank: int, chain: Sequence[tuple[Interval, str]]) -> None:
    """Requires that a statement is missing at most at the end: it could have named any data."""
    before, ended = None, False
    for place, (stated, digest) in enumerate(sorted(chain, key=_number)):
        if ended:
            raise MalformedRun(f"rank {rank} goes on after its final statement, {place - 1}")
        if (stated.sequence, stated.previous) != (place, before):
            raise MalformedRun(
                f"statement {place} of rank {rank} is missing, exchanged or there twice: ask "
                "`sealring audit check` what was done to the records"
            )
        before, ended = digest, stated.final


def _has_end(chain: Sequence[tuple[Interval, str]]) -> bool:
    return bool(chain) and max(chain, key=_number)[0].final


def _number(stated: tuple[Interval, str]) -> int:
    return stated[0].sequence


def _spent(said: Privacy) -> tuple[bool, Decimal]:
    """A sort key: more privacy spent is larger, and text that is no number is the largest."""
    try:
        epsilon = Decimal(said.epsilon)
    except InvalidOperation:
        epsilon = Decimal("NaN")
    return (False, epsilon) if epsilon.is_finite() else (True, Decimal(0))


# ---- SLSA: datasets are dependencies, the job's authority built the model


PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "https://sealring.github.io/sealring/training/v1"


def slsa_statement(
    facts: RunFacts, export: Transformation, subjects: Sequence[Named]
) -> dict[str, Any]:
    dependencies = [
        *(_resource(one, "dataset") for one in facts.datasets),
        _resource(facts.code.script, "script"),
        *(_resource(one, "checkpoint") for one in export.inputs),
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [as_subject(one) for one in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "job": facts.job,
                    "world": facts.world,
                    "steps": facts.steps,
                    "configuration": facts.configuration,
                },
                "internalParameters": {
                    "packages": facts.code.packages,
                    "sealring": facts.code.sealring,
                    "python": facts.code.python,
                    "torch": facts.code.torch,
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": f"urn:sealring:authority:sha256:{facts.authority}"},
                "metadata": {
                    "invocationId": f"urn:sealring:run:{facts.run}",
                    "startedOn": rfc3339(facts.started),
                    "finishedOn": rfc3339(facts.finished),
                },
                "byproducts": [
                    {"name": f"evidence ({one.label})", "digest": {"sha256": one.evidence}}
                    for one in facts.attestations
                ],
            },
        },
    }  # fmt: skip


def sign_slsa(statement: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    return seal_envelope(json.dumps(statement, separators=(",", ":")).encode(), key)


def _resource(one: Named, kind: str) -> dict[str, Any]:
    return {**as_subject(one), "annotations": {"kind": kind}}


# ---- the bill of materials


def bill_of_materials(facts: RunFacts, export: Transformation, files: Sequence[Named]) -> bytes:
    datasets = [
        _component("data", one, f"dataset-{number}") for number, one in enumerate(facts.datasets)
    ]
    packages = [_package(line) for line in facts.packages.decode("utf-8", "replace").splitlines()]
    model = {
        **_component("machine-learning-model", files[0], "model"),
        "modelCard": {
            "modelParameters": {"datasets": [{"ref": one["bom-ref"]} for one in datasets]},
            "properties": [
                {"name": "sealring:job", "value": facts.job},
                {"name": "sealring:run", "value": facts.run},
                {"name": "sealring:steps", "value": str(facts.steps)},
                {"name": "sealring:world", "value": str(facts.world)},
                *({"name": "sealring:checkpoint", "value": one.sha256} for one in export.inputs),
            ],
        },
    }
    tool = {"type": "application", "name": "sealring", "version": __version__}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, facts.run + files[0].sha256)}",
        "version": 1,
        "metadata": {
            "timestamp": rfc3339(export.finished),
            "tools": {"components": [tool]},
            "component": model,
        },
        "components": [
            *datasets,
            _component("file", facts.code.script, "script"),
            *(_component("file", one, f"file-{number}") for number, one in enumerate(files[1:])),
            *packages,
        ],
        "dependencies": [
            {
                "ref": "model",
                "dependsOn": [one["bom-ref"] for one in (*datasets, *packages)] + ["script"],
            }
        ],
    }  # fmt: skip
    return json.dumps(document, indent=1).encode() + b"\n"


def _component(kind: str, one: Named, reference: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": one.sha256}]
    return {"type": kind, "bom-ref": reference, "name": one.name, "hashes": hashes}


def _package(line: str) -> dict[str, Any]:
    name, _, version = line.partition("==")
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


# ---- the model card: names come from strangers and are written as plain text


def model_card(facts: RunFacts, export: Transformation, files: Sequence[Named]) -> str:
    parts = [
        f"# {_text(files[0].name)}\n",
        "Generated from the signed records of the run that made it. It says what the workers and\n"
        "the owner signed; `sealring audit check` checks it.\n",
        "## Files\n",
        _table(("file", "SHA-256"), ((one.name, one.sha256) for one in files)),
        "## Training\n",
        _table(
            ("", ""),
            (
                ("job", facts.job),
                ("run", facts.run),
                ("workers", str(facts.world)),
                ("steps", str(facts.steps)),
                ("from", rfc3339(facts.started)),
                ("to", rfc3339(facts.finished)),
                ("records", f"{facts.statements}{'' if facts.complete else '; some are missing'}"),
                ("script", f"{facts.code.script.name} ({facts.code.script.sha256})"),
                ("sealring", facts.code.sealring),
                ("torch", facts.code.torch),
                ("Python", facts.code.python),
                ("container", facts.code.container or "not recorded"),
                ("exported from", ", ".join(f"{one.name} ({one.sha256})" for one in export.inputs)),
            ),
        ),
        "## Data\n",
        _table(("dataset", "SHA-256"), ((one.name, one.sha256) for one in facts.datasets))
        if facts.datasets
        else "No data were recorded.\n",
        "## Steps before training\n",
        _table(
            ("kind", "name", "inputs", "outputs"),
            (
                (one.kind, one.name, _names(one.inputs), _names(one.outputs))
                for one in facts.transformations
                if one.kind in ("ingest", "stage")
            ),
        )
        if any(one.kind in ("ingest", "stage") for one in facts.transformations)
        else "None were recorded.\n",
        "## Machines\n",
        _table(
            ("attested as", "evidence", "policy"),
            ((one.label, one.evidence, one.policy) for one in facts.attestations),
        )
        if facts.attestations
        else "The workers' certificates name no evidence.\n",
        "## Privacy\n",
        f"{_text(facts.privacy.mechanism)}: epsilon {_text(facts.privacy.epsilon)}, delta "
        f"{_text(facts.privacy.delta)}, as the script reported.\n"
        if facts.privacy
        else "No accounting was recorded.\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _names(found: Iterable[Named]) -> str:
    return ", ".join(one.name for one in found)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_text(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Escapes a name, so that it cannot become Markdown or HTML."""
    plain = "".join(one if one.isprintable() else " " for one in value[:500]).strip()
    escaped = re.sub(r"([\\`*_{}\[\]()<>#+!|&~^])", r"\\\1", plain)
    # At the start of a line: lists and underlines. Anywhere: text that readers turn into links.
    escaped = re.sub(r"^([0-9]+)(?=\.)|^(?=[-=])", r"\1\\", escaped)
    return re.sub(r"(?i)(?<=www)(?=\.)|(?=://)", r"\\", escaped)


# ---- OpenSSF model signing: a bundle over all files, which its own tool verifies


def sign_model(model: Path, key: Path, bundle: Path, files: Sequence[Named]) -> Named:
    """Signs the file or folder with an elliptic-curve key. Returns what the bundle is about.

    `files` are the model's files as the caller has read them. The tool reads them again, and what
    it finds must be the same before the key signs.
    """
    try:
        from model_signing import hashing, signing
    except ImportError:
        raise ConfigurationError(
            "signing a model needs a package: pip install 'sealring[model-signing]'",
            code="configuration.missing_extra",
        ) from None
    # The tool does not check who else can read the key.
    read_secret_file(key, "the model's key", ConfigurationError).wipe()
    try:
        hasher = _Compared(hashing.Config(), model, files)  # type: ignore[no-untyped-call]
        configured: Any = signing.Config()  # type: ignore[no-untyped-call]
        configured.set_hashing_config(hasher).use_elliptic_key_signer(private_key=key)
        configured.sign(model, bundle)
    except (ValueError, OSError) as problem:
        raise ConfigurationError(
            f"{model} cannot be signed with {key}: {problem}. Make a key with `openssl ecparam "
            "-name prime256v1 -genkey -noout -out model.key`"
        ) from None
    return subject_of(bundle)


class _Compared:
    """Replaces the tool's hashing of a model, and compares the result with the expected files."""

    def __init__(self, hasher: Any, model: Path, files: Sequence[Named]) -> None:
        self._hasher = hasher
        # The tool names a single file ".".
        self._files = {one.name if model.is_dir() else ".": one.sha256 for one in files}

    def hash(self, model: Path) -> Any:
        manifest = self._hasher.hash(model)
        found = {
            one.identifier: one.digest.digest_value.hex() for one in manifest.resource_descriptors()
        }
        if found != self._files:
            name = min(name for name, _ in found.items() ^ self._files.items())
            raise ConfigurationError(
                f"{(model if name == '.' else name)!s} was changed before it could be signed, or "
                "is a file that model signing leaves out: nothing is signed"
            )
        return manifest


def subject_of(bundle: Path) -> Named:
    """The name and root digest of the model that a bundle is about. Checks nothing."""
    envelope = read_json(bundle.read_text())["dsseEnvelope"]
    (subject,) = read_json(base64.b64decode(envelope["payload"]))["subject"]
    return Named(subject["name"], subject["digest"]["sha256"])


# ---- all papers


def write_papers(
    model: Path,
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    owner: Ed25519PrivateKey,
    model_key: Path,
    out: Path,
    job: str | None = None,
) -> list[Path]:
    """Writes all papers and returns their paths. `model` is an exported file or a folder of them.

    `job` is the job that the run must belong to. None: the one that `run.json` names, which is not
    signed.
    """
    files = files_of(model)
    facts = facts_of(run, authorities, [owner.public_key()], job)
    (export, envelope), *others = [facts.export_of(one.sha256) for one in files]
    if any(other != envelope for _, other in others):
        raise ConfigurationError(
            f"the files of {model} are of several exports, and papers are of one: write them apart"
        )
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise ConfigurationError(f"{out} is there already: choose another folder") from None
    except OSError as problem:
        raise not_written(out, problem, "made") from None
    try:
        root = sign_model(model, model_key, out / "model.sig", files)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    about = [root, *(one for one in files if one.sha256 != root.sha256)]
    written = {
        "export.dsse.json": envelope,
        "slsa.dsse.json": sign_slsa(slsa_statement(facts, export, about), owner),
        "README.md": model_card(facts, export, files).encode(),
        "model.cdx.json": bill_of_materials(facts, export, files),
    }
    for name, content in written.items():
        write_public(out / name, content)
    return [out / "model.sig", *(out / name for name in written)]


def files_of(model: Path) -> list[Named]:
    paths = sorted(one for one in model.rglob("*") if one.is_file()) if model.is_dir() else [model]
    if not paths:
        raise ConfigurationError(f"{model} has no files")
    base = model if model.is_dir() else model.parent
    return [Named(path.relative_to(base).as_posix(), digest_of_file(path)) for path in paths]
