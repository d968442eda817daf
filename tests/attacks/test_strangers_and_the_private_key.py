"""Strangers connect to the listener of an existing group, to make a worker load its key."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.core.handshake.resumption import FRAME
from sealring.core.identity import kept_key as module
from sealring.core.identity.credentials import kept_for_later
from sealring.core.identity.kept_key import KeptKey
from tests.core.links.worlds import ISSUER, world


@pytest.mark.threat("J19")
def test_openings_of_unknown_sessions_load_no_private_key(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    plain = module.load_der_private_key  # type: ignore[attr-defined]

    def load(*arguments: Any, **options: Any) -> Any:
        loads.append(1)
        return plain(*arguments, **options)

    with world(9) as one:
        one.start_all()
        one.join()
        mesh = one.mesh(0)
        monkeypatch.setattr(module, "load_der_private_key", load)
        for _ in range(20):
            with socket.create_connection(mesh.agreed.members[0].addresses[0]) as sock:
                sock.sendall(FRAME + (88).to_bytes(2, "big") + bytes(88))
                assert sock.recv(5) == FRAME + bytes(2), "no such session"
        assert not loads


@pytest.mark.threat("J19")
def test_an_rsa_key_is_not_checked_anew_for_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checking an RSA key takes up to a second, in which no other Python thread runs."""
    options: list[dict[str, Any]] = []
    plain = module.load_der_private_key  # type: ignore[attr-defined]

    def load(*arguments: Any, **given: Any) -> Any:
        options.append(given)
        return plain(*arguments, **given)

    monkeypatch.setattr(module, "load_der_private_key", load)
    key = rsa.generate_private_key(65537, 2048)
    later = kept_for_later(replace(ISSUER.credentials(0), key=KeptKey.of(key)), 2)
    assert later().private_key.private_numbers() == key.private_numbers()  # type: ignore[union-attr]
    assert [given["unsafe_skip_rsa_key_validation"] for given in options] == [True]
