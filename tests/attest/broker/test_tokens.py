"""What a token says, and how often an address may ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OKPKey

from sealring.formats.http import Rates
from tests.attest.broker.local import JOB, Place
from tests.attest.broker.test_every_kind import CASES, at
from tests.attest.broker.test_hostile_clients import HELLO, Worker


def token_of(place: Place) -> dict[str, Any]:
    store = place.open_store()
    broker = place.broker(store)

    async def act() -> str:
        session, nonce, _ = await broker.challenge(HELLO)
        worker = Worker(None, place)  # type: ignore[arg-type]
        worker.nonce = nonce
        return await broker.attest(session, worker.body())

    try:
        token = asyncio.run(act())
    finally:
        broker.close()
        store.close()
    public = OKPKey.import_key(place.keys.token_key.public_key())
    claims: dict[str, Any] = jwt.decode(token, public, algorithms=["Ed25519"]).claims
    return claims


def test_simulated_evidence_affirms_nothing(place: Place) -> None:
    claims = token_of(place)
    verdict = claims["submods"]["worker"]
    assert claims["eat_profile"] == "tag:github.com,2023:veraison/ear"
    assert verdict["ear.status"] == "none"
    assert set(verdict["ear.trustworthiness-vector"].values()) == {0}
    assert verdict["ear.veraison.annotated-evidence"]["label"] == "SIMULATED"
    assert claims["sealring"]["name"] == f"spiffe://sealring/{JOB}/rank/0"
    assert claims["cnf"]["jwk"]["crv"] == "P-256"
    assert "d" not in claims["cnf"]["jwk"]
    assert claims["exp"] - claims["iat"] == 300


def test_real_evidence_is_affirmed_with_what_it_showed(tmp_path: Path) -> None:
    verdict = token_of(at(tmp_path, CASES["snp"]))["submods"]["worker"]
    assert verdict["ear.status"] == "affirming"
    assert verdict["ear.appraisal-policy-id"].startswith("sha256:")
    assert json.dumps(verdict).count("SIMULATED") == 0


def test_an_address_gets_its_burst_and_then_its_rate() -> None:
    rates = Rates(per_second=2, burst=3)
    assert [rates.allow("a", 0) for _ in range(4)] == [True, True, True, False]
    assert rates.allow("b", 0)
    assert [rates.allow("a", 1) for _ in range(3)] == [True, True, False]
    assert [rates.allow("a", 100) for _ in range(4)] == [True, True, True, False]


def test_addresses_without_number_take_no_memory_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sealring.formats.http._ADDRESSES", 10)
    rates = Rates(per_second=1, burst=1)
    for number in range(100):
        assert rates.allow(str(number), 0)
    # The first addresses are forgotten.
    assert [rates.allow(address, 0) for address in ("99", "90", "0")] == [False, False, True]
