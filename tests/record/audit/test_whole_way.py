"""Attested workers train from a vault, and an auditor checks the records of the whole run.

Two workers with software TPMs join a broker, train, and save into a vault. The owner signs how the
data was made and what was exported. Witnesses cosign the log. All claims are then answered with
yes, and a part of the run gives the same bits when it is executed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sealring.core.identity.credentials import read_authorities
from sealring.formats.log.folder import LogWriter
from sealring.formats.log.notes import SignatureKind, Signer, Verifier
from sealring.formats.log.policy import Log, Witness, byzantine_policy
from sealring.record.statements.forms import Named
from sealring.record.statements.run_folder import RunFolder, open_run
from sealring.record.statements.signing import (
    create_owner,
    read_owner_key,
    read_signer,
    sign_statement,
    verify_statement,
)
from sealring.vault import CheckpointReader, Vault, key_file
from sealring.vault.checkpoint_export import export_torch
from sealring.vault.keys import make_key_file
from tests.attest.broker.local import JOB, Place, running
from tests.attest.broker.tpm_hosts import TpmHosts, tpm_hosts
from tests.attest.evidence import swtpm
from tests.record.audit.made_runs import CLEANER, RAW, stage

ROOT = Path(__file__).parents[3]
TRAIN = """
import os
if tpm := os.environ.get("TPM_OF_RANK_" + os.environ["RANK"]):
    os.environ["SEALRING_SETTINGS"] = '{"tpm": "' + tpm + '"}'
from tests.record.recording.script import main
main()
"""
"""Two workers on one machine, each with its own TPM as if on two machines."""
DATASET = Named("synthetic", "aa" * 32)
"""The dataset that the script says it reads."""

pytestmark = [swtpm.needs_swtpm, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Finished:
    folder: Path
    run: RunFolder
    place: Place

    def options(self) -> list[str]:
        return [
            "--authority", str(self.place.authority), "--owner", str(self.folder / "owner.pub"),
            "--policy", str(self.folder / "log.policy"),
            "--claims", str(self.folder / "claims.toml"),
        ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("whole")
    with tpm_hosts(folder, 2) as hosts, running(hosts.place) as broker:
        place = hosts.place
        train(folder, hosts, broker.port)
    run = open_run(folder / "run")
    add_owners_records(folder, run, place)
    cosign(folder, run)
    write_claims(folder, run, place)
    return Finished(folder, run, place)


def train(folder: Path, hosts: TpmHosts, port: int) -> None:
    (folder / "train.py").write_text(TRAIN)
    make_key_file(folder / "key")
    Vault.create(folder / "vault", key_file(folder / "key"), "owner")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    environ = {
        **kept, **hosts.environment(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        **{f"TPM_OF_RANK_{rank}": address for rank, address in enumerate(hosts.addresses)},
    }  # fmt: skip
    del environ["SEALRING_SECRET"]
    done = sealring(
        ["run", "-n", "2", "--record", str(folder / "run"), str(folder / "train.py"),
         str(folder / "vault"), str(folder / "key")], environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def sealring(
    arguments: list[str], environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sealring.cli", *arguments]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=200, check=False
    )


def add_owners_records(folder: Path, run: RunFolder, place: Place) -> None:
    """Add how the dataset was made, and the model that was exported from the last checkpoint."""
    create_owner(folder / "owner")
    owner = read_owner_key(folder / "owner")
    vault = Vault.open(folder / "vault", key_file(folder / "key"))
    authorities = read_authorities(place.authority)
    export_torch(
        CheckpointReader(vault, "model", version=3, authorities=authorities, job=JOB),
        folder / "model.pt",
    )
    model = Named("model.pt", hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest())
    last = next(one for one in checkpoints(run, authorities) if one.name == "model@3")
    made = [
        stage("clean", "ingest", [RAW], [DATASET], CLEANER),
        stage("export", "export", [Named(last.name, last.sha256)], [model], CLEANER),
    ]
    entries = [sign_statement(one, owner) for one in made]
    for one, envelope in zip(made, entries, strict=True):
        run.write_statement(f"owner-{one.name}", envelope)
    with LogWriter(run.log, read_signer(run.key)) as log:
        log.append(entries)


def checkpoints(run: RunFolder, authorities: Any) -> list[Any]:
    content = [verify_statement(envelope, authorities).content for _, envelope in run.statements()]
    return [one for each in content for one in getattr(each, "checkpoints_out", [])]


def cosign(folder: Path, run: RunFolder) -> None:
    signers = [
        Signer.generate(f"example.org/w{number}", SignatureKind.COSIGNATURE) for number in range(4)
    ]
    witnesses = [Witness(f"w{number}", one.verifier) for number, one in enumerate(signers)]
    log = Log(Verifier.parse(run.vkey.read_text().strip()))
    (folder / "log.policy").write_text(byzantine_policy([log], witnesses).encode())
    with LogWriter(run.log, read_signer(run.key)) as writer:
        text = writer.checkpoint.note.text
        writer.add_cosignatures([one.sign(text, int(time.time())) for one in signers[:3]])


def write_claims(folder: Path, run: RunFolder, place: Place) -> None:
    shutil.copy(place.policy, folder / "policy.toml")
    (folder / "claims.toml").write_text(
        f'version = 1\ntrained_only_on = ["{RAW.sha256}"]\n'
        f'stages = [{{ name = "clean", code = "{CLEANER.sha256}" }}]\n'
        f'code = {{ "train.py" = ["{hashlib.sha256(TRAIN.encode()).hexdigest()}"] }}\n'
        'machines = "policy.toml"\nranks = 2\nno_gaps = true\n'
        f"aggregation = {{ kinds = {json.dumps(sorted(kinds(run, place)))}, every_step = true }}\n"
    )


def kinds(run: RunFolder, place: Place) -> set[str]:
    authorities = read_authorities(place.authority)
    owners = [read_owner_key(run.path.parent / "owner").public_key()]
    content = [
        verify_statement(envelope, authorities, owners=owners).content
        for _, envelope in run.statements()
    ]
    return {count.kind for one in content for count in getattr(one, "collectives", [])}


def test_every_claim_is_shown_and_a_part_of_it_repeated(finished: Finished) -> None:
    shutil.copytree(finished.folder / "vault", finished.folder / "copy")
    done = sealring(
        ["audit", "check", str(finished.run.path), *finished.options(), "--json",
         "--model", str(finished.folder / "model.pt"), "--html", str(finished.folder / "page.html"),
         "--replay", "1", "--replay-tolerance", "1e-6", "--key", str(finished.folder / "key"),
         "--replay-vault", str(finished.folder / "copy"), "--", str(finished.folder / "copy"),
         str(finished.folder / "key")],
        {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["findings"] == []
    assert {one["claim"]: one["answer"] for one in found["claims"]} == dict.fromkeys(
        ("trained_only_on", "stages", "code", "machines", "ranks", "aggregation", "no_gaps",
         "model", "replay"), "yes",
    ), found  # fmt: skip
    assert done.returncode == 0
    (part,) = found["replay"]["repeated"]
    assert (part["verdict"], part["difference"]) == ("equal", None)
    assert (found["replay"]["parts"], found["replay"]["tolerance"]) == (3, 1e-6)
    assert found["log"]["cosigned_by"] == [f"example.org/w{number}" for number in range(3)]
    machines = next(one for one in found["claims"] if one["claim"] == "machines")
    assert machines["text"].startswith("2 certificates with their evidence"), machines
    assert "rank 1, interval 0" in (finished.folder / "page.html").read_text()


def test_a_real_statement_that_another_key_signed(finished: Finished, tmp_path: Path) -> None:
    """The disk replaces rank 1's first statement by one under another worker's signature."""
    shutil.copytree(finished.run.path, tmp_path / "run")
    (path,) = (tmp_path / "run" / "statements").glob("rank-00001-00000000*")
    value = json.loads(path.read_bytes())
    value["signatures"][0]["sig"] = json.loads(
        next((tmp_path / "run" / "statements").glob("rank-00000-*")).read_bytes()
    )["signatures"][0]["sig"]
    path.write_text(json.dumps(value, separators=(",", ":")))
    done = sealring(["audit", "check", str(tmp_path / "run"), *finished.options(), "--json"])
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {one["fault"] for one in found["findings"]} == {"not-logged", "forged"}
    assert all("rank 1 of job" in one["parties"][0] for one in found["findings"])
