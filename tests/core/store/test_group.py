"""The sealed store as torch uses it: in the default group and in torchrun's agents."""

from __future__ import annotations

import base64
import gc
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from sealring import sealed_store
from sealring.core.schedule import Operation
from sealring.core.store import SealedStore
from sealring.errors import ConfigurationError, StoreError, TamperedRecord, Unsupported
from sealring.lab.demo import wiretap
from sealring.lab.demo.wiretap import LyingStore, real_address
from tests.ports import free_port
from tests.workers import SECRET, Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Workers for this module only, because torch keeps a store's server for the process's life."""
    started = Workers(2)
    yield started
    started.close()


def plain_names() -> list[str]:
    """Returns the names in the environment's store, which anyone who connects can list."""
    server = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60)
    )
    return list(server.list_keys())


def sum_of_ranks(group: Any = None) -> float:
    tensor = torch.full([8], float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return float(tensor[0])


def over_a_sealed_url(rank: int, world: int, ports: list[int]) -> list[float]:
    """Makes groups repeatedly in one process, with sub-groups and garbage collection."""
    sums = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("sealring", init_method="sealring://")
        gc.collect()
        sums.append(sum_of_ranks())
        sums.append(sum_of_ranks(dist.new_group(list(range(world)))))
        dist.barrier()
        names = [] if rank else plain_names()
        # One name stays readable: torch's count of the workers that have come to a TCPStore.
        assert [name for name in names if len(name) != 64] in ([], ["init/"]), names
        assert rank or world == 1 or len(names) > 2
        dist.barrier()
        dist.destroy_process_group()
    return sums


# Rank 0 makes the server itself, as it does without a launcher.
NO_AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.mark.threat("T1")
def test_a_group_over_a_sealed_url(workers: Workers) -> None:
    ports = [free_port(), free_port()]
    results = workers.run(over_a_sealed_url, ports, group=False, env=NO_AGENT)
    assert results == [[1.0] * 4] * 2


def test_the_next_group_may_have_the_same_port(workers: Workers) -> None:
    # Only one rank, because a second could still find the old server, which torch manages.
    ports = [free_port()] * 2
    results = workers.run(over_a_sealed_url, ports, world=1, group=False, env=NO_AGENT)
    assert results == [[0.0] * 4]


def agreed_in_the_group(rank: int, world: int) -> tuple[bytes, float, str]:
    sealed = sealed_store(install=True)
    sealed.set(f"from {rank}", f"value of {rank}")
    found = sealed.get(f"from {1 - rank}")
    _, plain = distributed_c10d._world.pg_map[dist.group.WORLD]  # type: ignore[index]
    assert plain is sealed
    # torch now uses the sealed store to form a new group.
    total = sum_of_ranks(dist.new_group([0, 1]))
    hidden = sealed.inner
    try:
        hidden.set(sealed._keys.value_name("forged"), "text")
        sealed.get("forged")
    except StoreError as error:
        return found, total, error.code
    return found, total, "nothing"


def test_a_groups_store_under_a_key_agreed_in_it(workers: Workers) -> None:
    assert workers.run(agreed_in_the_group, env={"SEALRING_JOB": "agreed"}) == [
        (b"value of 1", 1.0, "store.tampered_value"),
        (b"value of 0", 1.0, "store.tampered_value"),
    ]


def keys_of_two_calls(rank: int, world: int) -> tuple[bytes, bytes]:
    first, second = sealed_store(), sealed_store()
    return bytes(first._keys.value_key), bytes(second._keys.value_key)


def test_members_share_a_fresh_key(workers: Workers) -> None:
    one, other = workers.run(keys_of_two_calls)
    assert one == other
    assert one[0] != one[1]


def test_without_a_group_there_is_nothing_to_seal() -> None:
    for install in (False, True):
        with pytest.raises(Unsupported, match="group of the sealring backend"):
            sealed_store(install=install)


def test_a_store_or_a_group_is_sealed_and_not_both() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        sealed_store(HashStore(), install=True)


# ---- no forged bytes reach pickle


class Counting(pickle.Unpickler):
    loads = 0

    def load(self) -> Any:
        Counting.loads += 1
        return super().load()


class FlipInABroadcast(wiretap.TappedWire):
    """Changes a bit of the broadcast record with the given number."""

    def _see(self, sighting: wiretap.Sighting) -> None:
        if sighting.is_data and sighting.fields["operation"] == Operation.BROADCAST:
            self.sightings.append(sighting)
            if self.flip and len(self.sightings) == self.flip.gradient:
                self._aim = (sighting, sighting.payload.start)


def objects_over_a_tapped_link(rank: int, world: int, number: int) -> tuple[str, int]:
    """Leads rank 1 to a relay in its own process; returns what it received and its pickle loads."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Store = dist.TCPStore(*address, timeout=timedelta(seconds=60))
    Counting.loads = 0
    with (
        patch.object(wiretap, "TappedWire", FlipInABroadcast),
        wiretap.Relay(lambda: real_address(store), wiretap.Flip(number)) as relay,
        patch.object(distributed_c10d, "_unpickler", Counting),
    ):
        used = LyingStore(store, about=0, relay=relay.address) if rank == 1 else store
        dist.init_process_group("sealring", store=used, rank=rank, world_size=world)
        objects = [{"a": [1, 2, 3]} if rank == 0 else None]
        try:
            dist.broadcast_object_list(objects, src=0)
            dist.barrier()
        except TamperedRecord as error:
            return type(error).__name__, Counting.loads
        finally:
            # The relay ends with rank 1's process, so rank 1 waits until rank 0 has everything.
            store.set(f"rank {rank} is done", "")
            store.wait([f"rank {1 - rank} is done"])
        assert objects == [{"a": [1, 2, 3]}]
        return "received", Counting.loads


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1, ("TamperedRecord", 0)), (2, ("TamperedRecord", 0)), (99, ("received", 1))],
    ids=["size", "object", "neither"],
)
@pytest.mark.threat("T10")
def test_no_changed_record_of_an_object_reaches_pickle(
    workers: Workers, number: int, expected: tuple[str, int]
) -> None:
    results = workers.run(
        objects_over_a_tapped_link, number, group=False, env={"SEALRING_TRANSPORT": "tcp"}
    )
    assert results[1] == expected


def agents(server: Any) -> Any:
    """Makes torchrun's handler as torchrun does, over a server that the test can write to."""
    params = RendezvousParameters("sealring", "127.0.0.1:0", "run", 1, 1, store_type="tcp")
    target = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend._create_tcp_store"
    with patch(target, lambda _params: server):
        return get_rendezvous_handler(params)


class Evil:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def test_agents_meet_over_a_sealed_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    server = HashStore()
    handler = agents(server)
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        # torch writes one constant under the plain name; it stays the only readable name.
        readable = [name for name in server.list_keys() if len(name) != 64]
        assert readable == ["torch.rendezvous.run"]
    finally:
        handler.shutdown()


@pytest.mark.threat("T9")
def test_no_forged_state_of_the_agents_reaches_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    server = HashStore()
    handler = agents(server)
    forged = base64.b64encode(pickle.dumps(Evil()))
    loaded: list[bytes] = []
    with patch.object(dynamic_rendezvous.pickle, "loads", loaded.append):
        for name in server.list_keys():
            server.set(name, forged)  # type: ignore[arg-type]
        with pytest.raises(RendezvousConnectionError) as raised:
            handler.next_rendezvous()
    assert isinstance(raised.value.__cause__, StoreError)
    assert raised.value.__cause__.code == "store.tampered_value"
    assert loaded == []


@pytest.mark.threat("T9")
def test_the_same_forgery_does_run_in_torchs_own_rendezvous() -> None:
    """Shows that the attack of the two tests above is real where the store is not sealed."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    server = HashStore()
    backend = C10dRendezvousBackend(server, "run")
    params = RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 1)
    handler = dynamic_rendezvous.create_handler(server, backend, params)
    server.set("torch.rendezvous.run", base64.b64encode(pickle.dumps(Evil())))  # type: ignore[arg-type]
    loaded: list[bytes] = []

    def load(data: bytes) -> Any:
        loaded.append(data)
        raise pickle.UnpicklingError

    with (
        patch.object(dynamic_rendezvous.pickle, "loads", load),
        pytest.raises(Exception, match="state"),
    ):
        handler.next_rendezvous()
    assert loaded == [pickle.dumps(Evil())]


def test_agents_without_a_secret_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALRING_SECRET", raising=False)
    monkeypatch.delenv("SEALRING_SECRET_FILE", raising=False)
    with pytest.raises(ConfigurationError, match="job secret"):
        agents(HashStore())


def test_a_sealed_store_is_a_store() -> None:
    assert issubclass(SealedStore, Store)
