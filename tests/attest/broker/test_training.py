"""Real process groups whose workers joined through a broker: they are renewed, or they end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sealring.errors import BrokerRefusal, NoLongerAdmitted
from tests.attest.broker.local import JOB, Place, running
from tests.codes import coded
from tests.workers import Workers

PATIENCE = timedelta(seconds=60)


def serial() -> int:
    from sealring.attest.broker.enrolment import this_worker

    return this_worker().certificate.serial_number


def trains_across_renewals(rank: int, world: int) -> tuple[int, int, float]:
    dist.init_process_group("sealring", timeout=PATIENCE)
    first, until = serial(), time.monotonic() + 60
    total = torch.zeros(1)
    # All ranks leave together, when each of them has been renewed.
    renewals, last = 0, first
    while time.monotonic() < until:
        if serial() != last:
            renewals, last = renewals + 1, serial()
        done = torch.tensor([renewals])
        dist.all_reduce(done, dist.ReduceOp.MIN)
        total += 1
        if done >= 1:
            break
        time.sleep(0.02)
    # A new group is made with the newest certificates.
    dist.new_group()
    dist.destroy_process_group()
    return first, last, float(total)


def test_certificates_are_renewed_and_training_goes_on(workers: Workers, tmp_path: Path) -> None:
    place = Place(tmp_path, minutes=0.2)
    with running(place) as broker:
        environment = place.environment(broker.port)
        results = workers.run(trains_across_renewals, world=2, group=False, env=environment)
    assert len({total for _, _, total in results}) == 1
    assert all(first != last for first, last, _ in results)


def trains_until_it_ends(rank: int, world: int, flag: str) -> str:
    dist.init_process_group("sealring", timeout=PATIENCE)
    dist.barrier()
    Path(flag + str(rank)).touch()
    until = time.monotonic() + 60
    try:
        while time.monotonic() < until:
            dist.all_reduce(torch.ones(10))
            time.sleep(0.01)
    except NoLongerAdmitted as error:
        first = str(error)
        dist.destroy_process_group()
    else:
        return "it went on"
    if rank == 1:
        # A worker that is out stays out: it has no next epoch.
        with pytest.raises(BrokerRefusal, check=coded("broker.worker_revoked")):
            dist.init_process_group("sealring", timeout=PATIENCE)
    return first


@pytest.mark.threat("B18")
def test_a_revoked_worker_is_out_at_the_next_renewal_and_stays_out(
    workers: Workers, tmp_path: Path
) -> None:
    place = Place(tmp_path, minutes=0.2)
    flag = str(tmp_path / "trains")
    with running(place) as broker:

        def revoke() -> None:
            until = time.monotonic() + 60
            while not all(Path(flag + rank).exists() for rank in "01"):
                assert time.monotonic() < until
                time.sleep(0.05)
            broker.revoke(1)

        revoking = threading.Thread(target=revoke)
        revoking.start()
        environment = place.environment(broker.port)
        results = workers.run(
            trains_until_it_ends, flag, world=2, group=False, env=environment, errors=True
        )
        revoking.join()
    for said in results:
        assert isinstance(said, str), said
        assert "taken out of the job" in said or "broker.worker_revoked" in said


def shows_its_key(rank: int, world: int) -> bytes:
    from sealring.attest.broker import data_key

    return data_key("data/key/train")


def test_a_script_gets_its_data_keys(workers: Workers, tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write_policy('[[resources]]\npath = "data/key/train"\n', top=f'job = "{JOB}"')
    path = place.data_keys / "data" / "key" / "train"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a data key")
    path.chmod(0o600)
    with running(place) as broker:
        environment = place.environment(broker.port)
        found = workers.run(shows_its_key, world=2, group=False, env=environment)
    assert found == [b"a data key"] * 2
