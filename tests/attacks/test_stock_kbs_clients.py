"""Clients of the stock KBS protocol try to get a data key without evidence of their own."""

from __future__ import annotations

import base64
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap

from sealring.attest.broker import ledger
from sealring.attest.broker.tokens import TOKEN_SECONDS
from sealring.errors import ConfigurationError
from tests.attest.broker.guest_evidence import AMD, SNP, snp
from tests.attest.broker.kbs_client import KbsClient, KbsRefusal, open_jwe, public_jwk
from tests.attest.broker.local import Place, Running, running
from tests.attest.broker.test_stock_clients import CONTENT, GUESTS, PATH, client, entries, kbs, put

UNBOUND = (401, "AttestationError", "evidence.not_bound")
UNKNOWN_NONCE = (401, "AttestationError", "broker.unknown_nonce")
REUSED_NONCE = (401, "AttestationError", "broker.reused_nonce")
NO_TOKEN = (401, "TokenNotFound", "broker.unknown_token")
ENDED = (401, "TokenVerifierError", "broker.expired_token")
NOWHERE = (404, "InvalidRequestPath", "broker.no_such_resource")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return kbs(tmp_path, AMD.trust(), SNP)


@pytest.mark.threat("B15")
def test_a_nonce_and_its_evidence_are_sent_again(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        body = guest.attestation(guest.auth())
        session = guest.cookie
        guest.attest(body)
        assert guest.refused(lambda: guest.attest(body)) == REUSED_NONCE
        # The thief tries in its own session, and without a session.
        guest.auth()
        assert guest.refused(lambda: guest.attest(body)) == UNKNOWN_NONCE
        guest.cookie = ""
        assert guest.refused(lambda: guest.attest(body)) == UNKNOWN_NONCE
        # The session is bound to its TEE, so another TEE's name does not fit.
        guest.cookie = session.replace(".snp", ".tdx")
        assert guest.refused(lambda: guest.attest(body)) == UNKNOWN_NONCE
    with running(place) as broker:
        # A broker that restarts still knows the used nonce.
        assert guest.refused(lambda: client_at(broker, guest, session).attest(body)) == REUSED_NONCE


def client_at(broker: Running, guest: KbsClient, session: str) -> KbsClient:
    guest.port, guest.cookie = broker.port, session
    return guest


@pytest.mark.threat("B15")
def test_a_nonce_whose_evidence_failed_is_used_up(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        nonce = guest.auth()
        good = guest.attestation(nonce)
        bad = {**good, "tee-evidence": {"primary_evidence": snp(bytes(48)), **ADDITIONAL}}
        assert guest.refused(lambda: guest.attest(bad)) == UNBOUND
        assert guest.refused(lambda: guest.attest(good)) == REUSED_NONCE


ADDITIONAL = {"additional_evidence": ""}


@pytest.mark.threat("B15")
def test_evidence_that_was_made_for_another_key(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        body = guest.attestation(guest.auth())
        for key in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
            nonce = guest.auth()
            stolen = guest.attestation(nonce)
            stolen["runtime-data"]["tee-pubkey"] = public_jwk(key)
            assert guest.refused(lambda stolen=stolen: guest.attest(stolen)) == UNBOUND
        assert body["runtime-data"]["nonce"] != nonce
        assert guest.refused(lambda: guest.fetch(PATH)) == NO_TOKEN


@pytest.mark.threat("B15")
def test_a_token_or_session_of_another_guest_fetches_nothing_that_opens(place: Place) -> None:
    with running(place) as broker:
        honest, thief = client(broker), client(broker)
        honest.handshake()
        thief.cookie, thief.token = honest.cookie, honest.token
        sealed = thief.ask("GET", f"/kbs/v0/resource/{PATH}").good()
        assert open_jwe(sealed, honest.key) == CONTENT
        for token in (False, True):
            with pytest.raises(InvalidUnwrap):
                thief.fetch(PATH, token=token)


@pytest.mark.threat("B15")
def test_a_token_counts_and_not_the_cookie_beside_it(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        head, claims, signature = guest.token.split(".")
        none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
        flipped = signature[:-2] + ("AA" if signature[-2:] != "AA" else "BB")
        worker = {"authorization": "Basic Zm9vOmJhcg=="}
        for headers in (
            {"authorization": f"Bearer {none}.{claims}."},
            {"authorization": f"Bearer {head}.{claims}.{flipped}"},
            {"authorization": "Bearer"},
            worker,
        ):
            path = f"/kbs/v0/resource/{PATH}"
            refused = guest.refused(lambda h=headers, p=path: guest.ask("GET", p, headers=h).good())
            assert refused == NO_TOKEN


@pytest.mark.threat("B15")
def test_sessions_that_were_never_attested(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        guest.auth()
        assert guest.refused(lambda: guest.fetch(PATH)) == NO_TOKEN
        for cookie in ("", "x", "0" * 32 + ".snp", "..", "guest/", '"', "a" * 4000):
            guest.cookie = cookie
            assert guest.refused(lambda: guest.fetch(PATH)) == NO_TOKEN


@pytest.mark.threat("B14")
def test_paths_that_lead_elsewhere(place: Place) -> None:
    put(place, "gpt/key/secret", b"not granted")
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        for path in (
            "../ca/authority.key", "gpt/key/../key/dataset", "gpt/key/..", "gpt%2Fkey%2Fdataset",
            "gpt/key/%64ataset", "%2e%2e/ca/authority.key", f"{PATH}/", f"/{PATH}", f"{PATH}?x=1",
            f"{PATH}%00", f"{PATH}#x", "gpt/key", "", "gpt\\key\\dataset", f"{PATH};x", "./" + PATH,
        ):  # fmt: skip
            assert guest.refused(lambda path=path: guest.fetch(path)) == NOWHERE, path
        assert guest.fetch(PATH) == CONTENT
        for path in ("/kbs/v0//resource/" + PATH, "/kbs/v0/Resource/" + PATH):
            assert guest.refused(lambda path=path: guest.ask("GET", path).good()) == NOWHERE


@pytest.mark.threat("B16")
def test_strangers_leave_nothing_in_the_store(place: Place) -> None:
    def keys() -> set[str]:
        with sqlite3.connect(place.database) as connection:
            return {key for (key,) in connection.execute("SELECT key FROM rows")}

    with running(place) as broker:
        client(broker).handshake()
        before = keys()
        for _ in range(20):
            guest = client(broker, prove=lambda digest: snp(bytes(48)))
            assert guest.refused(guest.handshake) == UNBOUND
            assert guest.refused(lambda guest=guest: guest.fetch(PATH)) == NO_TOKEN
        assert keys() - before <= {"state"}
        assert len([key for key in keys() if key.startswith("guest/")]) == 1


@pytest.mark.threat("B16")
def test_a_guest_is_given_only_so_much_in_one_session(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "GIFTS", 5)
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        for _ in range(5):
            assert guest.fetch(PATH) == CONTENT
        assert guest.refused(lambda: guest.fetch(PATH)) == ENDED
        for number in range(20):
            guest.refused(lambda number=number: guest.fetch(f"a/b/{number}"))
        assert len(entries(broker)) == 6
        guest.handshake()
        for number in range(20):
            denied = guest.refused(lambda number=number: guest.fetch(f"a/b/{number}"))
            assert denied == (403, "PolicyDeny", "broker.resource_not_granted")
        assert len(entries(broker)) == 6 + 1 + 8


@pytest.mark.threat("B15")
def test_sessions_at_the_same_time_are_apart(place: Place) -> None:
    with running(place) as broker:

        def act(_: int) -> bytes:
            guest = client(broker)
            guest.handshake()
            return guest.fetch(PATH)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(act, range(16))) == [CONTENT] * 16
            one = client(broker)
            body = one.attestation(one.auth())
            outcomes = list(pool.map(lambda _: attempt(one, body), range(8)))
        assert sorted(outcomes) == ["attested"] + ["broker.reused_nonce"] * 7
        log = entries(broker)
    assert len({entry["guest"] for entry in log}) == 17


def attempt(guest: KbsClient, body: dict[str, Any]) -> str:
    try:
        guest.attest(body)
    except KbsRefusal as refusal:
        return refusal.error
    return "attested"


@pytest.mark.threat("B15")
def test_a_session_ends_and_is_forgotten(place: Place) -> None:
    start = place.clock()
    now = [start]
    place.clock = place.boottime = lambda: now[0]
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        assert guest.fetch(PATH) == CONTENT
        now[0] = start + TOKEN_SECONDS
        for token in (False, True):
            assert guest.refused(lambda token=token: guest.fetch(PATH, token=token)) == ENDED
        from sealring.attest.broker import ledger

        broker.store.submit(lambda view: ledger.sweep(view, now[0])).result()
        assert guest.refused(lambda: guest.fetch(PATH)) == NO_TOKEN


@pytest.mark.threat("B14")
def test_a_revoked_machine_gets_nothing_more(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        (machine,) = {entry["machine"] for entry in entries(broker) if "machine" in entry}
        with pytest.raises(ConfigurationError):
            broker.decide(lambda ledger, view: ledger.bar_machine(view, 1.0, machine[:-1] + "x"))
        broker.decide(lambda ledger, view: ledger.bar_machine(view, 1.0, machine))
        revoked = (403, "PolicyDeny", "broker.worker_revoked")
        assert guest.refused(lambda: guest.fetch(PATH)) == revoked
        assert guest.refused(lambda: guest.fetch(PATH, token=True)) == revoked
        again = client(broker)
        assert again.refused(again.handshake) == revoked
        last = entries(broker)[-1]
    assert (last["event"], last["error"]) == ("refused", "broker.worker_revoked")


@pytest.mark.threat("B14")
def test_a_guests_token_makes_no_worker(tmp_path: Path) -> None:
    """The token gives neither a certificate nor a resource that only workers are granted."""
    workers = '[[resources]]\npath = "gpt/key/workers"\n'
    place = kbs(tmp_path, AMD.trust(), SNP, GUESTS + workers)
    put(place, "gpt/key/workers", b"not for guests")
    with running(place) as broker:
        guest = client(broker)
        guest.handshake()
        for path in ("sealring/certificate/worker", "gpt/key/workers"):
            for token in (False, True):
                refused = guest.refused(lambda p=path, t=token: guest.fetch(p, token=t))
                assert refused == (403, "PolicyDeny", "broker.resource_not_granted")
