"""The broker's verbs as an operator types them, and a whole attested job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from sealring.attest.broker.ledger import Applicant, JobLedger
from sealring.attest.evidence.attesters import make_simulator
from sealring.cli import app
from sealring.core.identity.names import WorkerName
from sealring.errors import BrokerRefusal, ConfigurationError, TamperedStore
from sealring.formats.log.checkpoints import Checkpoint, open_checkpoint
from sealring.formats.log.folder import read_checkpoint
from sealring.formats.log.notes import Note, Verifier
from sealring.formats.log.policy import Log, LogPolicy
from tests.attest.broker.local import Place, running
from tests.cli.test_commands import SCRIPT, sealring
from tests.codes import coded
from tests.ports import free_port

SEALRING = Path(sys.executable).parent / "sealring"


@contextmanager
def serving(directory: Path, port: int, page: int) -> Iterator[None]:
    """Runs the broker with the commands of docs/attestation.md."""
    log = directory / "broker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                SEALRING, "broker", "--policy", "policy.toml", "--ca", "ca",
                "--listen", f"127.0.0.1:{port}", "--page", f"127.0.0.1:{page}",
                "--name", "127.0.0.1", "--log", "audit",
            ],
            cwd=directory,
            stderr=output,
        )  # fmt: skip
        try:
            until = time.monotonic() + 60
            while "Its page is" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_an_attested_job_from_nothing(tmp_path: Path) -> None:
    def do(*arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if "SEALRING" not in name}
        done = subprocess.run(
            [SEALRING, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    do("ca", "init", "ca")
    stanza = do("policy", "new", "--simulator", "simulator")
    policy = "version = 1\n[peers]\nevidence = true\n"
    (tmp_path / "policy.toml").write_text(policy + stanza[stanza.index("[simulated]") :])
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    with serving(tmp_path, port, free_port()):
        done = sealring(
            "run", "-n", "2", "--job", "hello", "--broker", f"https://127.0.0.1:{port}",
            "--authority", str(tmp_path / "ca" / "authority.pem"),
            "--policy", str(tmp_path / "policy.toml"), str(tmp_path / "train.py"),
            SEALRING_ATTESTER=f"simulated:{tmp_path / 'simulator'}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "sum 3.0 [] hello"
    assert "SIMULATED" in (tmp_path / "broker.log").read_text()
    log = json.loads(do("broker", "audit", "--ca", "ca", "--json"))
    joined = [
        (entry["rank"], entry["kind"]) for entry in log["entries"] if entry["event"] == "joined"
    ]
    assert sorted(joined) == [(0, "SIMULATED"), (1, "SIMULATED")]
    # A run that ended well gave its ranks back.
    assert sum(entry["event"] == "left" for entry in log["entries"]) == 2
    (tmp_path / "seen").write_text(log["checkpoint"])
    assert "SIMULATED" in do("broker", "audit", "--ca", "ca", "--seen", "seen")
    # The broker also publishes the log (--log); at the broker's start the log was empty.
    own = LogPolicy((Log(Verifier.parse(log["vkey"])),))
    assert open_checkpoint(read_checkpoint(tmp_path / "audit"), own).size <= log["number"]


def test_one_error_once_and_last(place: Place) -> None:
    (place.directory / "train.py").write_text(SCRIPT)
    make_simulator(place.directory / "stranger")
    with running(place) as broker:
        done = sealring(
            "run", "-n", "2", "--job", "job", "--broker", f"https://127.0.0.1:{broker.port}",
            "--authority", str(place.authority), "--policy", str(place.policy),
            str(place.directory / "train.py"),
            SEALRING_ATTESTER=f"simulated:{place.directory / 'stranger'}",
        )  # fmt: skip
    assert done.returncode == 1
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("evidence.untrusted_chain: "), done.stderr
    assert "evidence.untrusted_chain" not in "".join(before)
    assert "Traceback" not in done.stderr
    assert len(before) < 6, done.stderr


def test_revoke_release_and_audit(place: Place) -> None:
    invoke = CliRunner().invoke
    ca = ["--ca", str(place.ca)]
    with running(place) as broker:
        broker.join(0)
        done = invoke(app, ["broker", "revoke", *ca, "--job", "job", "--rank", "0"])
        assert "Out: rank 0 of job" in done.stdout, done.output
        # The broker uses the same store meanwhile.
        assert len(broker.client_keys_out()) == 1
        done = invoke(app, ["broker", "release", *ca, "--job", "job", "--rank", "0"])
        assert "Rank 0 of job is free" in done.stdout
        broker.join(0)
    done = invoke(app, ["broker", "audit", *ca, "--json"])
    events = [entry["event"] for entry in json.loads(done.stdout)["entries"]]
    assert events == ["joined", "gave", "revoked", "released", "joined", "gave"]
    seen = place.directory / "seen"
    text = Checkpoint(place.keys.audit_key.name, 7, bytes(32)).encode()
    seen.write_bytes(Note(text, (place.keys.audit_key.sign(text),)).encode())
    refused = invoke(app, ["broker", "audit", *ca, "--seen", str(seen)])
    assert isinstance(refused.exception, TamperedStore)
    assert refused.exception.code == "broker.broken_audit_log"
    for arguments in (["revoke", *ca], ["revoke", *ca, "--job", "job", "--rank", "9"]):
        assert isinstance(invoke(app, ["broker", *arguments]).exception, ConfigurationError)


def test_all_ranks_of_a_job_are_released_together_and_what_was_revoked_stays(place: Place) -> None:
    invoke, ca = CliRunner().invoke, ["--ca", str(place.ca)]
    with running(place) as broker:
        for rank in range(30):  # more than one commit can free
            broker.join(rank, world=30)
        broker.revoke(7)
        done = invoke(app, ["broker", "release", *ca, "--job", "job"])
        assert "30 ranks of job are free" in done.stdout, done.output
        broker.join(0)
        with pytest.raises(
            BrokerRefusal, match="rank 7 of job", check=coded("broker.worker_revoked")
        ):
            broker.join(7, world=30)
        done = invoke(app, ["broker", "release", *ca, "--job", "jbo"])
        assert isinstance(done.exception, ConfigurationError)
        assert "no rank of jbo is held" in str(done.exception)


def test_a_machine_with_a_typo_is_not_reported_as_barred(place: Place) -> None:
    invoke, ca = CliRunner().invoke, ["--ca", str(place.ca)]
    machine = "5a" * 32
    applicant = Applicant(WorkerName("job", 0), 1, "f" * 64, (machine,), "tpm 2.0", {})
    store = place.open_store()
    ledger = JobLedger(place.keys.audit_key, 0)
    store.submit(lambda view: ledger.admit(view, "00", 0, 0.0, applicant)).result()
    store.close()
    typo = machine[:-1] + "b"
    for verb in ("revoke", "release"):
        done = invoke(app, ["broker", verb, *ca, "--machine", typo])
        assert isinstance(done.exception, ConfigurationError), done.output
    done = invoke(app, ["broker", "revoke", *ca, "--machine", typo])
    assert f"{machine} is similar" in str(done.exception)
    done = invoke(app, ["broker", "revoke", *ca, "--machine", machine])
    assert f"Out: machine {machine}" in done.stdout
    assert "rank 0 of job" in done.stdout
    done = invoke(app, ["broker", "revoke", *ca, "--machine", typo, "--unseen"])
    assert f"Out: machine {typo}" in done.stdout
    done = invoke(app, ["broker", "release", *ca, "--machine", machine])
    assert f"Machine {machine} may join again" in done.stdout


def test_a_data_key_that_others_can_read_stops_the_broker_at_its_start(place: Place) -> None:
    place.write_policy('[[resources]]\npath = "data/key/train"\n')
    key = place.data_keys / "data" / "key" / "train"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"key")
    key.chmod(0o644)
    arguments = [
        "--policy", str(place.policy), "--ca", str(place.ca), "--keys", str(place.data_keys),
        "--listen", "127.0.0.1:0", "--page", "none",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["broker", *arguments])
    assert isinstance(done.exception, ConfigurationError)
    assert "mode 0644" in str(done.exception)


def test_a_certificate_that_is_shown_says_simulated(place: Place) -> None:
    with running(place) as broker:
        certificate = broker.join(0).certificate
    file = place.directory / "worker.pem"
    file.write_bytes(certificate.public_bytes(Encoding.PEM))
    shown = CliRunner().invoke(app, ["ca", "show", str(file), "--json"])
    assert json.loads(shown.stdout)[0]["attestation"].startswith("SIMULATED, measurement ")


def test_what_it_needs_is_said(place: Place) -> None:
    def problem(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["broker", *arguments])
        assert isinstance(done.exception, ConfigurationError)
        return str(done.exception)

    assert "needs --policy" in problem()
    policy, ca = ["--policy", str(place.policy)], ["--ca", str(place.ca)]
    assert "not HOST:PORT" in problem(*policy, *ca, "--listen", "nowhere")
    assert "through `ssh -L`" in problem(
        *policy, *ca, "--listen", "127.0.0.1:0", "--page", "0.0.0.0:0"
    )
