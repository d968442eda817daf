"""A model's papers are generated from records, and accepted by the tools they are made for."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import model_signing
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from securesystemslib.dsse import Envelope

from sealring.errors import ConfigurationError, ForgedStatement, MalformedRun
from sealring.record import record_transformation
from sealring.record.papers import facts_of, files_of, model_card, write_papers
from sealring.record.statements.forms import (
    Named,
    Privacy,
    Transformation,
    digest_of_file,
    parameters_of,
)
from sealring.record.statements.run_folder import RunFolder, create_run
from sealring.record.statements.signing import sign_statement, statement_digest, verify_statement
from tests.record.statements.test_independent_verifier import key_of
from tests.record.statements.test_statements import AUTHORITY, authority_of, interval, worker

OWNER = Ed25519PrivateKey.generate()
NOW = int(datetime.now(UTC).timestamp())
FOREIGN = Named("other weights", "cd" * 32)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = create_run(tmp_path / "run", "job", "r1")
    packages = folder.write_evidence(b"numpy==2.0\ntorch==2.13.0\n")
    for rank in (0, 1):
        code = {**FIELDS_CODE, "packages": packages}
        content = interval(run="r1", final=True, end_step=10, code=code)
        folder.write_statement(f"rank-{rank}", sign_statement(content, worker(rank)))
    return folder


FIELDS_CODE = {
    "script": {"name": "train.py", "sha256": "01" * 32}, "packages": "06" * 32,
    "sealring": "1", "python": "3.12", "torch": "2.13", "container": None,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, run: RunFolder) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    record_transformation(run.path, export_of(path), OWNER)
    return path


def export_of(path: Path) -> Transformation:
    inputs = [Named("weights", "ab" * 32)]
    return Transformation(
        "export", path.name, inputs, files_of(path), [], parameters_of({}), NOW, NOW
    )


@pytest.fixture
def model_key(tmp_path: Path) -> Path:
    key = generate_private_key(SECP256R1())
    path = tmp_path / "model.key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    spki = PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "model.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, spki))
    return path


def payload(path: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


def test_each_paper_is_accepted_by_the_tool_that_reads_it(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path
) -> None:
    out = tmp_path / "papers"
    written = write_papers(model, run, [AUTHORITY], OWNER, model_key, out)
    assert sorted(path.name for path in written) == [
        "README.md", "export.dsse.json", "model.cdx.json", "model.sig", "slsa.dsse.json",
    ]  # fmt: skip
    verifier = model_signing.verifying.Config().use_elliptic_key_verifier(
        public_key=tmp_path / "model.pub"
    )
    verifier.verify(model, out / "model.sig")
    # The export's record and SLSA's provenance describe the same file.
    found = verify_statement(
        (out / "export.dsse.json").read_bytes(), [], owners=[OWNER.public_key()]
    )
    assert found.subjects == (Named("model.safetensors", digest_of_file(model)),)
    slsa = (out / "slsa.dsse.json").read_text()
    Envelope.from_dict(json.loads(slsa)).verify([key_of(OWNER.public_key())], 1)
    statement = payload(out / "slsa.dsse.json")
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    (bundle,) = json.loads(
        base64.b64decode(json.loads((out / "model.sig").read_text())["dsseEnvelope"]["payload"])
    )["subject"]
    assert bundle["digest"] in [one["digest"] for one in statement["subject"]]
    assert {"sha256": digest_of_file(model)} in [one["digest"] for one in statement["subject"]]
    needs = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [one["name"] for one in needs] == ["corpus", "train.py", "weights"]
    model.write_bytes(b"other weights")
    with pytest.raises(ValueError, match=r"(?i)mismatch|fail|hash"):
        verifier.verify(model, out / "model.sig")


def test_the_bill_of_materials_lists_data_code_and_packages(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path
) -> None:
    write_papers(model, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers")
    bom = json.loads((tmp_path / "papers" / "model.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    described = bom["metadata"]["component"]
    assert described["type"] == "machine-learning-model"
    assert described["hashes"] == [{"alg": "SHA-256", "content": digest_of_file(model)}]
    (dataset,) = described["modelCard"]["modelParameters"]["datasets"]
    parts = {one["bom-ref"]: one for one in bom["components"]}
    assert parts[dataset["ref"]]["name"] == "corpus"
    assert parts["pkg:pypi/torch@2.13.0"]["version"] == "2.13.0"
    card = (tmp_path / "papers" / "README.md").read_text()
    assert digest_of_file(model) in card
    assert "corpus" in card
    assert "no evidence" in card


@pytest.mark.threat("A17")
def test_names_of_strangers_are_plain_text_in_the_card(run: RunFolder, model: Path) -> None:
    facts = facts_of(run, [AUTHORITY], [OWNER.public_key()])
    bad = replace(facts, job="<script>alert(1)</script> [x](javascript:1) | `y`\n# z")
    card = model_card(bad, facts.transformations[0], files_of(model))
    assert "<script>" not in card.replace("\\<", "")
    assert "\n# z" not in card
    assert "\\[x\\]\\(javascript:1\\) \\| \\`y\\`" in card


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("https://example.com/x", r"https\://example.com/x"),
        ("see WWW.example.com", r"see WWW\.example.com"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("    code", "code"),
        ("===", r"\==="),
        ("model-2@30, 2026-11-01T12:00:00Z", "model-2@30, 2026-11-01T12:00:00Z"),
    ],
)
def test_a_name_begins_no_list_and_becomes_no_link(
    name: str, text: str, run: RunFolder, model: Path
) -> None:
    facts = facts_of(run, [AUTHORITY], [OWNER.public_key()])
    spent = replace(facts, privacy=Privacy(name, "1", "0", "{}"))
    card = model_card(spent, facts.transformations[0], files_of(model))
    assert f"\n{text}: epsilon 1, delta 0" in card


def test_files_of_two_exports_get_no_papers_together(
    run: RunFolder, model_key: Path, tmp_path: Path
) -> None:
    """The papers would name one of the two checkpoints."""
    folder = tmp_path / "models"
    folder.mkdir()
    for number in range(2):
        path = folder / f"{number}.safetensors"
        path.write_bytes(b"weights %d" % number)
        record_transformation(run.path, export_of(path), OWNER)
    with pytest.raises(ConfigurationError, match="are of several exports"):
        write_papers(folder, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers")
    assert not (tmp_path / "papers").exists()


@pytest.mark.threat("A17")
def test_what_gets_no_papers(run: RunFolder, model: Path, model_key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"swapped")
    out = tmp_path / "papers"
    with pytest.raises(MalformedRun, match="no export of run r1"):
        write_papers(other, run, [AUTHORITY], OWNER, model_key, out)
    with pytest.raises(ForgedStatement, match="not an owner's"):
        write_papers(model, run, [AUTHORITY], Ed25519PrivateKey.generate(), model_key, out)
    (tmp_path / "no.key").write_text("no key")
    (tmp_path / "no.key").chmod(0o600)
    with pytest.raises(ConfigurationError, match="openssl ecparam"):
        write_papers(model, run, [AUTHORITY], OWNER, tmp_path / "no.key", out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ConfigurationError, match="is there already"):
        write_papers(model, run, [AUTHORITY], OWNER, model_key, out)


def test_statements_of_another_run_or_job_are_not_summed_up(run: RunFolder) -> None:
    content = interval(run="r0", final=True, end_step=10, code=FIELDS_CODE)
    path = run.write_statement("stranger", sign_statement(content, worker(1)))
    with pytest.raises(MalformedRun, match="stranger is of run r0"):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])
    path.unlink()
    assert facts_of(run, [AUTHORITY], [OWNER.public_key()]).complete


@pytest.mark.threat("A15")
def test_the_builder_is_the_authority_that_issued_the_workers_certificates(run: RunFolder) -> None:
    """A file of authorities may list others first, for example after an authority was replaced."""
    other = authority_of(Ed25519PrivateKey.generate())
    facts = facts_of(run, [other, AUTHORITY], [OWNER.public_key()])
    assert facts.authority == AUTHORITY.fingerprint(SHA256()).hex()


@pytest.mark.threat("A15")
def test_workers_of_two_authorities_get_no_papers(run: RunFolder) -> None:
    """Papers name one builder, which would vouch for workers that it never admitted."""
    key = Ed25519PrivateKey.generate()
    content = interval(run="r1", final=True, end_step=10, code=FIELDS_CODE)
    run.statement_path("rank-1").write_bytes(sign_statement(content, worker(1, authority=key)))
    with pytest.raises(MalformedRun, match="certificates of 2 authorities"):
        facts_of(run, [AUTHORITY, authority_of(key)], [OWNER.public_key()])


@pytest.mark.threat("A15")
def test_workers_of_another_job_write_no_papers_for_this_ones_model(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path
) -> None:
    """Of two jobs under one authority, a worker of one claims it wrote the other's checkpoint."""
    with pytest.raises(MalformedRun, match="is of job job, and not of other"):
        write_papers(model, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers", "other")
    assert not (tmp_path / "papers").exists()
    assert write_papers(model, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers", "job")


@pytest.mark.threat("A15")
def test_a_list_of_packages_that_was_removed_is_missed(run: RunFolder) -> None:
    facts = facts_of(run, [AUTHORITY], [OWNER.public_key()])
    (run.path / "evidence" / facts.code.packages).unlink()
    with pytest.raises(MalformedRun, match="no list of the packages"):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])


def chain_of(run: RunFolder, rank: int, *spent: str, final: int | None = None) -> None:
    """Replace the rank's one statement by a chain, in which statement `final` is marked final."""
    run.statement_path(f"rank-{rank}").unlink()
    previous = None
    for sequence, epsilon in enumerate(spent):
        privacy = {"mechanism": "dp", "epsilon": epsilon, "delta": "0", "parameters": "{}"}
        content = interval(
            run="r1", sequence=sequence, previous=previous, end_step=10, code=FIELDS_CODE,
            privacy=privacy, final=sequence == final,
        )  # fmt: skip
        envelope = sign_statement(content, worker(rank))
        previous = statement_digest(envelope)
        run.write_statement(f"rank-{rank}-{sequence}", envelope)


def test_a_chain_without_an_end_and_the_most_privacy_that_was_spent(run: RunFolder) -> None:
    chain_of(run, 1, "9.5", "10.5", "1.5")
    facts = facts_of(run, [AUTHORITY], [OWNER.public_key()])
    assert not facts.complete
    assert facts.privacy is not None
    assert facts.privacy.epsilon == "10.5"


def test_a_chain_that_goes_on_after_its_end_gets_no_papers(run: RunFolder) -> None:
    chain_of(run, 1, "1", "2", "3", final=1)
    with pytest.raises(MalformedRun, match="rank 1 goes on after its final statement, 1"):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])


@pytest.mark.threat("A15")
def test_a_chain_with_a_statement_left_out_exchanged_or_added_gets_no_papers(
    run: RunFolder,
) -> None:
    chain_of(run, 1, "1", "2", "3")
    middle = run.statement_path("rank-1-1")
    envelope = middle.read_bytes()
    broken = r"statement 1 of rank 1 is missing, exchanged or there twice"
    middle.unlink()
    with pytest.raises(MalformedRun, match=broken):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])
    run.write_statement("rank-1-1", sign_statement(interval(
        run="r1", sequence=1, previous="aa" * 32, end_step=10, code=FIELDS_CODE), worker(1)
    ))  # fmt: skip
    with pytest.raises(MalformedRun, match=broken):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])
    middle.write_bytes(envelope)
    first = interval(run="r1", end_step=11, code=FIELDS_CODE)
    run.write_statement("second", sign_statement(first, worker(1)))
    with pytest.raises(MalformedRun, match=broken):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])


@pytest.mark.threat("A15")
def test_an_export_of_another_run_gets_no_papers(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path
) -> None:
    """An owner's record names no run, so the disk's owner can put it beside another run."""
    foreign = tmp_path / "foreign.safetensors"
    out = tmp_path / "papers"
    for inputs in ([Named("weights", "cd" * 32)], [Named("weights", "ab" * 32), FOREIGN], []):
        foreign.write_bytes(repr(inputs).encode())
        record_transformation(run.path, replace(export_of(foreign), inputs=inputs), OWNER)
        with pytest.raises(MalformedRun, match="which no rank of run r1 wrote"):
            write_papers(foreign, run, [AUTHORITY], OWNER, model_key, out)
    assert not out.exists()
    write_papers(model, run, [AUTHORITY], OWNER, model_key, out)


@pytest.mark.threat("A15")
def test_a_folder_with_links_gets_no_papers(run: RunFolder, model: Path, tmp_path: Path) -> None:
    statements = run.path / "statements"
    statements.rename(tmp_path / "elsewhere")
    statements.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedRun, match="'statements' is a symlink"):
        facts_of(run, [AUTHORITY], [OWNER.public_key()])


@pytest.mark.threat("A16")
def test_a_model_that_changes_before_it_is_signed_is_not_signed(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's owner gives the tool other bytes than those looked up in the records."""
    real = model_signing.hashing.Config.hash

    def swapped(self: Any, path: Path) -> Any:
        path.write_bytes(b"other weights")
        try:
            return real(self, path)
        finally:
            path.write_bytes(b"weights")

    monkeypatch.setattr(model_signing.hashing.Config, "hash", swapped)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors was changed before it could"):
        write_papers(model, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers")
    assert not (tmp_path / "papers").exists()


@pytest.mark.threat("A16")
def test_a_file_that_the_bundle_would_leave_out_is_named(
    run: RunFolder, model_key: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"weights")
    (folder / ".git" / "b.bin").write_bytes(b"more weights")
    record_transformation(run.path, export_of(folder), OWNER)
    with pytest.raises(ConfigurationError, match=r"^\.git/b\.bin was changed .* leaves out"):
        write_papers(folder, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers")


def test_a_models_key_that_others_can_read_does_not_sign(
    run: RunFolder, model: Path, model_key: Path, tmp_path: Path
) -> None:
    model_key.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"can be used by others .* `chmod 600"):
        write_papers(model, run, [AUTHORITY], OWNER, model_key, tmp_path / "papers")
