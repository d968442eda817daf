"""Certificates are renewed while members wait for the last member."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity import Credentials, WorkerName
from sealring.core.identity.certificates import issue
from sealring.core.identity.kept_key import KeptKey
from sealring.core.links import Mesh
from tests.core.links.worlds import ISSUER, world


class Renewed:
    """A broker's credentials: a new certificate every second, valid for four seconds."""

    def __init__(self, rank: int, world: int) -> None:
        self._name, self._world = WorkerName("job", rank), world
        self._key = Ed25519PrivateKey.generate()
        self._made = 0.0
        self()

    def __call__(self) -> Credentials:
        if time.monotonic() >= self._made + 1:
            self._made = time.monotonic()
            certificate = issue(
                ISSUER.certificate, ISSUER.key, self._key.public_key(), self._name, self._world,
                timedelta(seconds=4), datetime.now(UTC),
            )  # fmt: skip
            kept = KeptKey.of(self._key)
            own, authorities = self._name, (ISSUER.certificate,)
            self._now = Credentials(own.job, own.rank, certificate, authorities, kept)
        return self._now


@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("late", ["first", "last"])
@pytest.mark.threat("B20")
def test_members_that_wait_for_longer_than_their_certificates_live(size: int, late: str) -> None:
    """In a tree, members whose neighbours are all linked speak before the last member has come."""
    missing = 0 if late == "first" else size - 1
    with world(size, timeout=30.0) as mesh:

        def start(rank: int) -> None:
            current = Renewed(rank, size)
            own = mesh.terms(rank, settings={"peer_evidence": 0})
            mesh.start(rank, credentials=current(), own_terms=own, current=current)

        for rank in range(size):
            if rank != missing:
                start(rank)
        time.sleep(6.0)
        start(missing)
        mesh.join()
        assert {type(outcome) for outcome in mesh.outcomes.values()} == {Mesh}
