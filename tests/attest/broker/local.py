"""A broker in this process, on a thread of its own, and SIMULATED workers that ask it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.authenticated import VersionNote
from sealring.attest.broker.client import BrokerClient, Joined
from sealring.attest.broker.clock import boottime
from sealring.attest.broker.keys import BrokerKeys, open_broker_keys
from sealring.attest.broker.ledger import JobLedger
from sealring.attest.broker.server import serving
from sealring.attest.broker.service import Broker, BrokerRules
from sealring.attest.broker.store import LedgerStore, SqliteStore, StoreView
from sealring.attest.evidence import Trust
from sealring.attest.evidence.attesters import make_simulator
from sealring.attest.evidence.cache import read_policy, trust_in
from sealring.core.identity.authority import create_authority
from sealring.core.identity.names import WorkerName
from sealring.formats.http import ServerLimits

JOB = "job"
PATIENCE = 60.0


@dataclass
class Place:
    """The files of one broker: its authority, its policy, its store, its simulator."""

    directory: Path
    minutes: float | None = None
    """How long certificates live. The policy has whole minutes, which are too long for a test."""
    trust: Callable[[], Trust] | None = None
    """The trust for evidence under a test's own roots."""
    clock: Callable[[], float] = time.time
    boottime: Callable[[], float] = boottime
    attester: Any = field(init=False)
    keys: BrokerKeys = field(init=False)

    def __post_init__(self) -> None:
        create_authority(self.ca, "test authority")
        self.keys = open_broker_keys(self.ca)
        self.attester = make_simulator(self.simulator)
        self.write_policy()

    def write_policy(self, more: str = "", top: str = "") -> None:
        self.policy.write_text(
            f"version = 1\n{top}\n{more}\n[simulated]\n"
            f'roots = ["{self.attester.simulator.fingerprint}"]\n'
            f'measurements = ["{self.attester.measurement.hex()}"]\n'
        )

    @property
    def ca(self) -> Path:
        return self.directory / "ca"

    @property
    def authority(self) -> Path:
        return self.ca / "authority.pem"

    @property
    def policy(self) -> Path:
        return self.directory / "policy.toml"

    @property
    def simulator(self) -> Path:
        return self.directory / "simulator"

    @property
    def data_keys(self) -> Path:
        return self.directory / "keys"

    @property
    def database(self) -> Path:
        return self.ca / "broker.sqlite"

    @property
    def note(self) -> VersionNote:
        return VersionNote(self.ca / "broker.version")

    def environment(self, port: int) -> dict[str, str]:
        """The environment of a worker that joins at this port."""
        return {
            "SEALRING_BROKER": f"https://127.0.0.1:{port}",
            "SEALRING_AUTHORITY": str(self.authority),
            "SEALRING_POLICY": str(self.policy),
            "SEALRING_ATTESTER": f"simulated:{self.simulator}",
            "SEALRING_JOB": JOB,
            "SEALRING_SECRET": "",
        }

    def open_store(self) -> LedgerStore:
        return SqliteStore(self.database, self.keys.store_key, self.note)

    def broker(self, store: LedgerStore) -> Broker:
        policy, digest = read_policy(self.policy)
        if self.minutes is not None:
            policy = replace(policy, certificate_minutes=self.minutes)
        rules = BrokerRules(policy, digest, self.trust or trust_in(policy, None), self.data_keys)
        return Broker(self.keys, store, rules, self.clock, self.boottime)


@dataclass
class Running:
    place: Place
    broker: Broker
    port: int
    page_port: int
    store: LedgerStore
    loop: asyncio.AbstractEventLoop

    def client(self) -> BrokerClient:
        return BrokerClient([("127.0.0.1", self.port)], [self.place.keys.authority])

    def join(
        self, rank: int = 0, world: int = 4, key: Ed25519PrivateKey | None = None, job: str = JOB
    ) -> Joined:
        return asyncio.run(
            self.client().join(
                WorkerName(job, rank),
                world,
                key or Ed25519PrivateKey.generate(),
                self.place.attester,
                PATIENCE,
            )
        )

    def client_keys_out(self) -> frozenset[str]:
        return asyncio.run(self.client().keys_out(JOB, PATIENCE))

    def decide(self, decide: Callable[[JobLedger, StoreView], Any]) -> Any:
        """Makes a decision as `sealring broker revoke` does."""
        ledger = JobLedger(self.place.keys.audit_key, 0)
        return self.store.submit(lambda view: decide(ledger, view)).result()

    def revoke(self, rank: int) -> None:
        self.decide(lambda ledger, view: ledger.revoke(view, time.time(), WorkerName(JOB, rank)))


@contextmanager
def running(
    place: Place,
    limits: ServerLimits | None = None,
    store: LedgerStore | None = None,
    port: int = 0,
    names: Sequence[str] = ("127.0.0.1", "localhost"),
) -> Iterator[Running]:
    store = store or place.open_store()
    started: threading.Event = threading.Event()
    found: list[Running] = []
    problems: list[BaseException] = []

    async def main() -> None:
        broker = place.broker(store)
        stop = asyncio.Event()
        async with serving(
            broker,
            place.keys,
            listen=("127.0.0.1", port),
            page=("127.0.0.1", 0),
            names=names,
            limits=limits or ServerLimits(),
        ) as (bound, page_port):
            assert page_port is not None
            loop = asyncio.get_running_loop()
            found.append(Running(place, broker, bound, page_port, store, loop))
            stopping.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as problem:
            problems.append(problem)
            started.set()

    stopping: list[Callable[[], object]] = []
    thread = threading.Thread(target=run, name="test broker")
    thread.start()
    started.wait()
    if problems:
        raise problems[0]
    try:
        yield found[0]
    finally:
        stopping[0]()
        thread.join()
        store.close()
        if problems:
            raise problems[0]
