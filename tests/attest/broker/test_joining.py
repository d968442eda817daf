"""All steps of a worker: nonce, evidence, verdict, certificate, data keys, renewal."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.client import BrokerClient
from sealring.attest.evidence.admission import key_digest
from sealring.attest.evidence.attesters import make_simulator
from sealring.attest.evidence.worker import claims_in
from sealring.core.identity.authority import create_authority
from sealring.core.identity.certificates import claims_of
from sealring.core.identity.names import WorkerName
from sealring.core.identity.verification import is_issued_by
from sealring.errors import (
    BrokerError,
    BrokerRefusal,
    BrokerUnavailable,
    PolicyRefusal,
    UntrustedChain,
)
from tests.attest.broker.local import JOB, Place, Running, running
from tests.codes import coded
from tests.ports import free_port


def test_a_worker_gets_a_short_certificate_for_exactly_its_rank(broker: Running) -> None:
    key = Ed25519PrivateKey.generate()
    joined = broker.join(2, world=4, key=key)
    claims = claims_of(joined.certificate)
    assert (claims.name, claims.world) == (WorkerName(JOB, 2), 4)
    assert joined.certificate.public_key() == key.public_key()
    assert is_issued_by(joined.certificate, (broker.place.keys.authority,))
    left = joined.certificate.not_valid_after_utc - datetime.now(UTC)
    assert 0 < left.total_seconds() <= 600


def test_the_certificate_says_what_the_evidence_showed_and_that_it_was_simulated(
    broker: Running,
) -> None:
    certificate = broker.join().certificate
    claimed = claims_in(certificate)
    assert claimed is not None
    assert (claimed.kind, claimed.label) == ("simulated", "SIMULATED")
    assert claimed.measurement == broker.place.attester.measurement.hex()
    assert b"SIMULATED" in certificate.tbs_certificate_bytes


@pytest.mark.threat("B5")
def test_a_rank_is_given_to_one_key_alone(broker: Running) -> None:
    broker.join(0)
    with pytest.raises(BrokerRefusal, match="rank 0 of job", check=coded("broker.rank_taken")):
        broker.join(0)
    broker.join(1)


def test_the_same_key_renews_and_counts_no_join(broker: Running) -> None:
    key = Ed25519PrivateKey.generate()
    first, second = broker.join(0, key=key), broker.join(0, key=key)
    assert first.certificate.serial_number != second.certificate.serial_number
    with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
        broker.join(0)


@pytest.mark.threat("B5")
def test_a_rank_is_joined_again_as_often_as_the_policy_says(place: Place) -> None:
    place.write_policy(top="rejoins = 2")
    with running(place) as broker:
        first = Ed25519PrivateKey.generate()
        broker.join(0, key=first)
        for _ in range(2):
            newest = broker.join(0)
        # The holders before it are out, and their peers are told so.
        assert len(newest.keys_out) == 2
        with pytest.raises(BrokerRefusal, check=coded("broker.worker_revoked")):
            broker.join(0, key=first)
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)


@pytest.mark.threat("B18")
def test_a_revoked_worker_is_refused_and_its_rank_stays_barred(broker: Running) -> None:
    key = Ed25519PrivateKey.generate()
    broker.join(0, key=key)
    broker.revoke(0)
    with pytest.raises(
        BrokerRefusal, match="no longer of job", check=coded("broker.worker_revoked")
    ):
        broker.join(0, key=key)
    # SIMULATED evidence names no machine, so the rank itself is barred until it is released.
    with pytest.raises(BrokerRefusal, match="was revoked", check=coded("broker.worker_revoked")):
        broker.join(0)
    broker.decide(lambda ledger, view: ledger.release(view, time.time(), WorkerName(JOB, 0)))
    assert len(broker.join(0).keys_out) == 1


def test_peers_are_told_of_a_worker_whose_certificate_ended(place: Place) -> None:
    """A worker that runs other software than it should would not end its groups itself."""
    late = [0.0]
    place.clock = place.boottime = lambda: time.time() + late[0]
    with running(place) as broker:
        key = Ed25519PrivateKey.generate()
        joined = broker.join(0)
        assert broker.join(1, key=key).keys_out == frozenset()
        late[0] = 601.0
        assert broker.join(1, key=key).keys_out == {key_digest(joined.certificate)}
        assert key_digest(joined.certificate) in broker.client_keys_out()


def test_what_the_policy_does_not_admit_gets_nothing(place: Place) -> None:
    place.write_policy('[[ranks]]\nranks = "1-3"\nkinds = ["simulated"]', top='job = "job"')
    with running(place) as broker:
        with pytest.raises(PolicyRefusal, check=coded("policy.rank_not_allowed")):
            broker.join(0)
        with pytest.raises(PolicyRefusal, check=coded("policy.job_not_allowed")):
            broker.join(1, job="other")
        broker.join(1)
        place.attester = type(place.attester)(place.attester.simulator, b"something else")
        with pytest.raises(PolicyRefusal, check=coded("policy.measurement_not_allowed")):
            broker.join(2)


@pytest.mark.threat("B14")
def test_data_keys_go_to_whom_the_policy_grants_them(place: Place) -> None:
    entry = '[[resources]]\npath = "data/key/{}"\nranks = "{}"\n'
    place.write_policy(entry.format("train", "0-1") + entry.format("test", "1"))
    for name in ("train", "test"):
        path = place.data_keys / "data" / "key" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        path.chmod(0o600)
    with running(place) as broker:
        assert broker.join(0).data_keys == {"data/key/train": b"train"}
        assert broker.join(1).data_keys == {"data/key/train": b"train", "data/key/test": b"test"}
        assert broker.join(2).data_keys == {}
        (place.data_keys / "data" / "key" / "train").unlink()
        with pytest.raises(
            BrokerRefusal, match="does not have it", check=coded("broker.no_such_resource")
        ):
            broker.join(0, key=Ed25519PrivateKey.generate(), job="another")


def test_a_data_key_that_others_can_read_is_the_operators_to_mend(place: Place) -> None:
    place.write_policy('[[resources]]\npath = "data/key/train"\n')
    path = place.data_keys / "data" / "key" / "train"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"key")
    path.chmod(0o644)
    with running(place) as broker:
        with pytest.raises(
            BrokerError,
            match=r"data/key/train .*mode 0644.*chmod 600",
            check=coded("broker.misconfigured"),
        ) as e:
            broker.join(0)
        assert str(place.data_keys) not in str(e.value)


def test_evidence_of_another_simulator_is_refused(broker: Running) -> None:
    broker.place.attester = make_simulator(broker.place.directory / "other")
    with pytest.raises(UntrustedChain):
        broker.join(0)


def test_a_policy_without_the_word_simulated_admits_none(place: Place) -> None:
    place.policy.write_text(
        f'version = 1\n[snp]\nmeasurements = ["{"5a" * 48}"]\n'
        'unchecked = ["minimum_tcb", "platform_info"]\n'
    )
    with running(place) as broker, pytest.raises(UntrustedChain):
        broker.join(0)


def join_through(client: BrokerClient, place: Place, seconds: float = 30.0) -> None:
    key = Ed25519PrivateKey.generate()
    asyncio.run(client.join(WorkerName(JOB, 0), 1, key, place.attester, seconds))


@pytest.mark.threat("B17")
def test_a_worker_believes_only_its_own_jobs_broker(broker: Running, place: Place) -> None:
    path = create_authority(place.directory / "stranger", "another")
    authority = x509.load_pem_x509_certificate(path.read_bytes())
    stranger = BrokerClient([("127.0.0.1", broker.port)], [authority])
    with pytest.raises(
        BrokerError, match="cannot prove to be the broker", check=coded("broker.untrusted_broker")
    ):
        join_through(stranger, place)


@pytest.mark.threat("B17")
def test_a_worker_believes_only_the_broker_of_that_name(place: Place) -> None:
    with running(place, names=["broker.example"]) as broker:
        with pytest.raises(
            BrokerError, match=r"is not for 127\.0\.0\.1", check=coded("broker.untrusted_broker")
        ):
            join_through(broker.client(), place)
        named = BrokerClient([("localhost", broker.port)], [place.keys.authority])
        with pytest.raises(
            BrokerError, match="is not for localhost", check=coded("broker.untrusted_broker")
        ):
            join_through(named, place)


def test_another_replica_is_asked_where_one_does_not_answer(broker: Running) -> None:
    authorities = [broker.place.keys.authority]
    dead = ("127.0.0.1", free_port())
    join_through(BrokerClient([dead, ("127.0.0.1", broker.port)], authorities), broker.place)
    with pytest.raises(BrokerUnavailable, check=coded("broker.unreachable")):
        join_through(BrokerClient([dead], authorities), broker.place, 0.5)
