"""Kills a broker at every step of issuing, starts it again, and checks what it then gives out.

Runs as a process of its own (`python -m tests.attest.broker.crashing DIR`) and without threads,
because it forks: a broker that dies at its n-th step, and another one in its place.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker import audit, server
from sealring.attest.broker.authenticated import Source
from sealring.attest.broker.client import BrokerClient
from sealring.attest.broker.ledger import Applicant, JobLedger
from sealring.attest.broker.store import SqliteStore
from sealring.core.identity.names import WorkerName
from sealring.formats.http import Handle, Request, Response, ServerLimits
from tests.attest.broker.local import JOB, Place
from tests.ports import free_port


class Steps:
    """Counts steps, and kills the process at one of them."""

    def __init__(self, fatal: int | None) -> None:
        self._left = fatal

    def pass_one(self) -> None:
        if self._left is not None:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


class DyingStore(SqliteStore):
    def __init__(self, place: Place, steps: Steps) -> None:
        self._steps = steps
        super().__init__(place.database, place.keys.store_key, place.note)

    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        def watched(source: Source) -> dict[str, bytes | None]:
            writes = run(source)
            self._steps.pass_one()  # decided, not committed
            return writes

        self._steps.pass_one()
        super().commit(watched)
        self._steps.pass_one()  # committed, but not answered


def serve(place: Place, port: int, fatal: int | None) -> None:
    """A broker that dies at its step `fatal`. If that is None, it lives until it is killed."""
    steps = Steps(fatal)
    routes = server.worker_routes

    def dying_routes(broker: Any) -> Handle:
        handle = routes(broker)

        async def watched(request: Request) -> Response:
            steps.pass_one()
            response = await handle(request)
            steps.pass_one()  # answered, not sent
            return response

        return watched

    server.worker_routes = dying_routes

    async def main() -> None:
        store = DyingStore(place, steps)
        async with server.serving(
            place.broker(store),
            place.keys,
            listen=("127.0.0.1", port),
            page=None,
            names=["127.0.0.1"],
            limits=ServerLimits(),
        ):
            await asyncio.Event().wait()

    asyncio.run(main())


def fork(act: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        act()
    finally:
        os._exit(1)


def supervise(place: Place, port: int, fatal: int) -> None:
    """Runs a broker that dies, then one that does not. A file says that the first one died."""
    os.setpgid(0, 0)
    _, status = os.waitpid(fork(lambda: serve(place, port, fatal)), 0)
    assert os.WIFSIGNALED(status)
    (place.directory / f"died-at-{fatal}").touch()
    serve(place, port, None)


def join_while_it_dies(place: Place, port: int, fatal: int) -> bool:
    """Joins as rank `fatal` through a broker that dies at that step. Returns whether it died."""
    supervisor = fork(lambda: supervise(place, port, fatal))
    key = Ed25519PrivateKey.generate()
    client = BrokerClient([("127.0.0.1", port)], [place.keys.authority])
    name = WorkerName(JOB, fatal)
    try:
        joined = asyncio.run(client.join(name, 1000, key, place.attester, 60.0))
    finally:
        os.killpg(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
    assert joined.certificate.public_key() == key.public_key()
    return (place.directory / f"died-at-{fatal}").exists()


def check_rank(place: Place, rank: int) -> None:
    """Checks that the rank has one holder, and that no other worker can become it."""
    store = place.open_store()
    ledger = JobLedger(place.keys.audit_key, 0)
    other = Applicant(WorkerName(JOB, rank), 1000, "f" * 64, (), "SIMULATED", {})
    refusal = store.submit(
        lambda view: ledger.admit(view, f"{rank:064x}", int(time.time()), time.time(), other)
    ).result()
    assert refusal is not None
    assert refusal.code == "broker.rank_taken", refusal
    public = place.keys.audit_key.verifier
    entries = store.submit(lambda view: audit.check(view, public)).result().entries
    keys = {
        entry["key"]
        for entry in entries
        if entry.get("rank") == rank and entry["event"] in ("joined", "gave", "renewed")
    }
    store.close()
    assert len(keys) == 1, keys


def revoke_while_it_dies(place: Place, fatal: int) -> bool:
    """Revokes rank 0 in a process that dies at a step. Returns whether the revocation is kept."""

    def revoke() -> None:
        store = DyingStore(place, Steps(fatal))
        ledger = JobLedger(place.keys.audit_key, 0)
        store.submit(lambda view: ledger.revoke(view, time.time(), WorkerName(JOB, 0))).result()

    os.waitpid(fork(revoke), 0)
    store = place.open_store()
    ledger = JobLedger(place.keys.audit_key, 0)
    applicant = Applicant(WorkerName(JOB, 0), 1000, "f" * 64, (), "SIMULATED", {})
    refusal = store.submit(
        lambda view: ledger.admit(view, f"{fatal:063x}r", int(time.time()), time.time(), applicant)
    ).result()
    store.close()
    return refusal is not None and refusal.code == "broker.worker_revoked"


def main(directory: Path) -> None:
    place, port = Place(directory), free_port()
    steps = 0
    while join_while_it_dies(place, port, steps):
        check_rank(place, steps)
        steps += 1
    revoked = [revoke_while_it_dies(place, fatal) for fatal in range(3)]
    print(json.dumps({"steps": steps, "revoked": revoked}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
