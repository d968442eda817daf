"""A stranger's file in a run's folder ends neither the training nor the audit."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

import sealring
from sealring.core.identity import load_credentials
from sealring.core.identity.loading import certificate_from_der, certificate_from_pem
from sealring.errors import (
    BadCredential,
    ConfigurationError,
    MalformedRun,
    MalformedStatement,
    VaultError,
)
from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import read_checkpoint
from sealring.formats.log.notes import Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.formats.signed import seal_envelope
from sealring.record.audit.audit import audit
from sealring.record.audit.findings import Fault
from sealring.record.statements.forms import Interval
from sealring.record.statements.run_folder import RunFolder, open_run
from sealring.record.statements.signing import sign_statement, verify_statement
from sealring.vault import signing
from tests.codes import coded
from tests.record.audit.made_runs import MadeRun
from tests.workers import SECRET


def of_version_8(der: bytes) -> bytes:
    """Returns the certificate with version field 7; X.509 counts from 0 and allows at most 2."""
    assert der.count(b"\xa0\x03\x02\x01\x02") == 1
    return der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07")


def as_pem(der: bytes) -> bytes:
    text = base64.b64encode(der).decode()
    lines = "\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return f"-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n".encode()


def with_certificate(envelope: bytes, pem: bytes) -> bytes:
    """Returns another signer's envelope with its certificate replaced by this one."""
    document = json.loads(envelope)
    document["signatures"][0]["certificate"] = base64.b64encode(pem).decode()
    return json.dumps(document, separators=(",", ":")).encode()


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)


@pytest.fixture(scope="module")
def strange_statement() -> bytes:
    made = MadeRun(world=1, count=1)
    *_, (_, envelope) = made.envelopes()
    return with_certificate(
        envelope, as_pem(of_version_8(made.workers[0].certificate.public_bytes(Encoding.DER)))
    )


@pytest.mark.threat("L17")
def test_a_certificate_of_version_8_is_refused_by_every_loader() -> None:
    """cryptography's InvalidVersion is not a ValueError."""
    der = of_version_8(MadeRun(world=1, count=1).workers[0].certificate.public_bytes(Encoding.DER))
    refusal = BadCredential("it cannot be read")
    with pytest.raises(
        BadCredential, match="it cannot be read", check=coded("configuration.bad_certificate")
    ):
        certificate_from_der(der, refusal)
    with pytest.raises(
        BadCredential, match="it cannot be read", check=coded("configuration.bad_certificate")
    ):
        certificate_from_pem(as_pem(der), refusal)
    signed = signing.Signed("{}", as_pem(der).decode(), "00")
    with pytest.raises(
        VaultError, match="not over what it says", check=coded("vault.unadmitted_signer")
    ):
        signing.check(signed, (), "job", "the manifest")


def test_a_statement_with_a_certificate_of_version_8_is_malformed(strange_statement: bytes) -> None:
    with pytest.raises(MalformedStatement, match="certificate cannot be read"):
        verify_statement(strange_statement, [])


def a_statement(path: Path, envelope: bytes) -> None:
    path.write_bytes(envelope)


def a_large_file(path: Path, _: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_ENTRY_BYTES + 1)


def a_link(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_nothing(path: Path, _: bytes) -> None:
    path.symlink_to("nothing")


def a_link_to_shm(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/shm")  # a folder of another file system


def a_fifo(path: Path, _: bytes) -> None:
    os.mkfifo(path)


def a_folder(path: Path, _: bytes) -> None:
    path.mkdir()


def a_folder_with_files(path: Path, _: bytes) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_bytes(b"")


def deep_json(path: Path, _: bytes) -> None:
    path.write_bytes(b"[" * 60_000)


Plant = Callable[[Path, bytes], None]
PLANTS = [
    a_statement, a_large_file, a_link, a_link_to_nothing, a_fifo, a_folder, a_folder_with_files,
    deep_json,
]  # fmt: skip


def logged(folder: RunFolder) -> int:
    policy = LogPolicy((Log(Verifier.parse(folder.vkey.read_text().strip())),))
    return open_checkpoint(read_checkpoint(folder.log), policy).size


def own_statements(folder: RunFolder, world: int = 1) -> int:
    found = 0
    for name in folder.statement_names():
        if name.startswith("rank-00000-"):
            verify_statement(folder.read_statement(name), load_credentials(0, world).authorities)
            found += 1
    return found


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.threat("L17")
def test_training_goes_on_after_a_strangers_statement(
    plant: Plant, tmp_path: Path, strange_statement: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        for step in records.steps(3):
            records.wait()
            if step == 1:
                plant(tmp_path / "run/statements/stranger.dsse.json", strange_statement)
    folder = open_run(tmp_path / "run")
    assert "stranger is not logged" in caplog.text
    assert (logged(folder), own_statements(folder)) == (4, 4)


@pytest.mark.threat("L14")
def test_many_strangers_files_fill_neither_the_log_nor_the_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 does not know the owners' keys, so a stranger's envelope looks like an owner's."""
    key = Ed25519PrivateKey.generate()
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        for step in records.steps(3):
            records.wait()
            if step == 1:
                for number in range(1100):
                    planted = tmp_path / f"run/statements/stranger-{number:04}.dsse.json"
                    planted.write_bytes(seal_envelope(b"%d" % number, key))
                    planted.with_name(f"junk-{number:04}.dsse.json").write_bytes(b"junk")
        records.close(final=False)
    folder = open_run(tmp_path / "run")
    assert (logged(folder), own_statements(folder)) == (3 + 1024, 3)
    (told,) = [text for text in caplog.messages if "not logged" in text]
    assert "the statement junk-0000 is not logged: " in told
    assert told.endswith("; nor are 1175 more")
    # A continued run counts the statements that are already in the log.
    caplog.clear()
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        list(records.steps(5))
    assert logged(folder) == 6 + 1024
    (told,) = [text for text in caplog.messages if "not logged" in text]
    assert told.endswith("; nor are 1175 more")


@pytest.mark.parametrize("name", ["notes.txt", "A.dsse.json", "\u202ex.dsse.json", ".nfs0001"])
@pytest.mark.threat("L17")
def test_training_goes_on_beside_a_file_that_no_run_has(name: str, tmp_path: Path) -> None:
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        for step in records.steps(3):
            records.wait()
            if step == 1:
                (tmp_path / "run/statements" / name).write_bytes(b"")
    folder = open_run(tmp_path / "run")
    assert (logged(folder), own_statements(folder)) == (4, 4)


@pytest.mark.parametrize("plant", [a_statement, a_link, a_link_to_nothing, a_fifo, a_link_to_shm])
@pytest.mark.threat("L14")
def test_training_goes_on_where_a_stranger_took_the_name_of_the_folder_for_unfinished_files(
    plant: Plant, tmp_path: Path, strange_statement: bytes
) -> None:
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        for step in records.steps(3):
            records.wait()
            if step == 1:
                (tmp_path / "run/.new").rmdir()
                plant(tmp_path / "run/.new", strange_statement)
    folder = open_run(tmp_path / "run")
    assert (logged(folder), own_statements(folder)) == (4, 4)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.threat("L17")
def test_training_goes_on_where_a_stranger_took_the_name_of_the_next_statement(
    plant: Plant, tmp_path: Path, strange_statement: bytes
) -> None:
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        for step in records.steps(3):
            records.wait()
            if step == 1:  # rank 0 sees the file in the next interval, before it needs the name
                plant(tmp_path / "run/statements/rank-00000-00000002.dsse.json", strange_statement)
    folder = open_run(tmp_path / "run")
    assert (logged(folder), own_statements(folder)) == (4, 4)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_run_that_is_continued_names_a_strangers_file_in_the_place_of_its_last_statement(
    plant: Plant, tmp_path: Path, strange_statement: bytes
) -> None:
    """The error names the file, which it once did not. Without the file the run goes on."""
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        records.step()
        records.close(final=False)
    taken = tmp_path / "run/statements/rank-00000-00000007.dsse.json"
    plant(taken, strange_statement)
    with pytest.raises(MalformedRun, match=rf"{taken} has the name .* did not write it, remove it"):
        sealring.record_run(tmp_path / "run", every=1, rank=0, world=1)
    taken.rename(tmp_path / "away")
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        assert list(records.steps(2)) == [1]


def test_a_second_worker_of_the_rank_still_ends_the_recording(tmp_path: Path) -> None:
    """Here the name is taken by a valid statement of the same rank, not by a stranger's file."""
    own = load_credentials(0, 1)
    records = sealring.record_run(tmp_path / "run", every=1, rank=0, world=1)
    records.step()
    records.wait()
    folder = open_run(tmp_path / "run")
    first = verify_statement(folder.read_statement("rank-00000-00000000"), own.authorities)
    assert isinstance(first.content, Interval)
    second = sign_statement(replace(first.content, sequence=1, previous=first.digest), own)
    folder.write_statement("rank-00000-00000001", second)
    records.step()
    with pytest.raises(ConfigurationError, match="exists, or is no name"):
        records.wait()
    with pytest.raises(ConfigurationError, match="exists, or is no name"):
        records.close()
    assert folder.read_statement("rank-00000-00000001") == second


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.threat("L17")
def test_a_strangers_file_in_the_place_of_evidence_is_replaced(
    plant: Plant, tmp_path: Path, strange_statement: bytes
) -> None:
    with sealring.record_run(tmp_path / "run", every=1, rank=0, world=1) as records:
        records.step()
        text = b'{"lr": 1}'
        folder = open_run(tmp_path / "run")
        digest = folder.write_evidence(text)
        (folder.path / "evidence" / digest).unlink()
        plant(folder.path / "evidence" / digest, strange_statement)
        records.configure(1, {"lr": 1})
        records.step()
        assert folder.evidence(digest) == text


@pytest.mark.threat("L17")
def test_an_audit_goes_on_after_a_statement_with_a_certificate_of_version_8(
    tmp_path: Path, strange_statement: bytes
) -> None:
    made = MadeRun(world=2, count=2)
    run = made.write(tmp_path / "run")
    run.statement_path("stranger").write_bytes(strange_statement)
    found = audit(run.path, made.trust).findings
    assert [(one.fault, one.parties[0]) for one in found] == [
        (Fault.NOT_LOGGED, "the author of the file"),
        (Fault.UNREADABLE, "the author of the file"),
    ]
