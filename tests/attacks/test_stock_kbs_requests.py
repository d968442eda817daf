"""Malformed and oversized requests of stock KBS clients, and requests with weak keys."""

from __future__ import annotations

import base64
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.formats.http import ServerLimits
from tests.attest.broker.guest_evidence import AMD, SNP, snp
from tests.attest.broker.kbs_client import public_jwk
from tests.attest.broker.local import Place, running
from tests.attest.broker.test_stock_clients import client, kbs
from tests.attest.broker.variants import variants

MALFORMED = (401, "SerdeError", "broker.malformed_request")
ADDITIONAL = {"additional_evidence": ""}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return kbs(tmp_path, AMD.trust(), SNP)


@pytest.mark.threat("B16")
def test_every_field_of_a_request_changed_in_turn(place: Place) -> None:
    with running(place, ServerLimits(requests_per_second=1e6, burst=1 << 30)) as broker:
        guest = client(broker)
        body = guest.attestation(guest.auth())

        def of_leaf(value: Any) -> tuple[Any, ...]:
            if isinstance(value, str):
                return (value + "A", value[1:], value.lower() + "=", None, 7, [])
            return ("x", -1, True, {})

        for changed in variants(body["runtime-data"], of_leaf):
            refused = guest.refused(
                lambda changed=changed: guest.attest({**body, "runtime-data": changed})
            )
            assert refused[0] == 401
            assert refused[2] in (
                "broker.malformed_request",
                "broker.unknown_nonce",
                "evidence.not_bound",
                "broker.reused_nonce",
            )
        lone = json.dumps(body).replace('evidence": ""', 'evidence": "\\ud800"').encode()
        odd: list[Any] = [
            b"", b"[]", b"{", b"\xff", b'{"runtime-data": 1, "runtime-data": 1}', b"[" * 100_000,
            {**body, "init-data": {"format": 1, "body": 2}}, {**body, "init-data": "x"},
            {**body, "more": 1}, {**body, "tee-evidence": {"primary_evidence": [], **ADDITIONAL}},
            {**body, "tee-evidence": {"primary_evidence": {}, "additional_evidence": {}}},
            lone,
        ]  # fmt: skip
        for data in odd:
            assert guest.refused(lambda data=data: guest.attest(data)) == MALFORMED


@pytest.mark.threat("B16")
def test_keys_and_algorithms_that_are_weak_or_wrong(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        strong = public_jwk(rsa.generate_private_key(65537, 2048))
        weak = public_jwk(rsa.generate_private_key(65537, 1024))
        point = public_jwk(guest.key)
        off = base64.urlsafe_b64encode(bytes(31) + b"\1").decode().rstrip("=")
        for jwk in (
            weak,
            {**strong, "alg": "RSA1_5"},
            {**strong, "alg": "RSA-OAEP"},
            {**strong, "e": "Aw"},
            {**strong, "n": strong["n"][:-1] + "A"},
            {**strong, "alg": point["alg"]},
            {**point, "alg": "ECDH-ES"},
            {**point, "alg": "none"},
            {**point, "alg": "dir"},
            {**point, "crv": "secp256k1"},
            {**point, "crv": "P-384"},
            {**point, "y": off},
            {**point, "x": point["x"] + "="},
            {**point, "d": point["x"]},
            {**point, "kty": "oct", "k": "AA"},
            {"kty": "oct", "alg": "A256KW", "k": "AA"},
            {"kty": "OKP", "crv": "X25519", "alg": point["alg"], "x": point["x"]},
        ):
            body = guest.attestation(guest.auth())
            body["runtime-data"]["tee-pubkey"] = jwk
            assert guest.refused(lambda body=body: guest.attest(body)) == MALFORMED, jwk


@pytest.mark.threat("B16")
def test_numbers_in_the_place_of_bytes_take_no_memory(place: Place) -> None:
    """Python's bytes(n) makes n zeros, so a report's field must not be a number such as 10**10."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with running(place) as broker:
        for name in ("measurement", "chip_id", "signature", "attestation_report", "cert_chain"):

            def prove(digest: bytes, name: str = name) -> dict[str, Any]:
                shown = snp(digest)
                report = shown["attestation_report"]
                if name == "signature":
                    report["signature"]["r"] = 1 << 31
                elif name in report:
                    report[name] = 1 << 31
                elif name == "cert_chain":
                    shown[name] = [{"cert_type": "VCEK", "data": 1 << 31}]
                else:
                    shown[name] = 1 << 31
                return shown

            guest = client(broker, prove=prove)
            refused = (401, "AttestationError", "evidence.malformed_evidence")
            assert guest.refused(guest.handshake) == refused
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 << 10, f"{grown >> 10} MiB"


@pytest.mark.threat("B16")
def test_chains_that_are_long_are_not_followed(place: Place) -> None:
    """A search for each issuer among thousands of certificates would take seconds."""

    def prove(digest: bytes, count: int) -> dict[str, Any]:
        shown = snp(digest)
        shown["cert_chain"] = [{"cert_type": "ASK", "data": [48, 0]}] * count
        return shown

    with running(place) as broker:
        malformed = (401, "AttestationError", "evidence.malformed_evidence")
        for count in (9, 4000):
            guest = client(broker, prove=lambda digest, count=count: prove(digest, count))
            assert guest.refused(guest.handshake) == malformed
        pem = b"".join(one.public_bytes(Encoding.PEM) for one in [AMD.ark] * 40)
        device = {"evidence": "00", "certificate": base64.b64encode(pem).decode()}
        many = json.dumps({"nvidia": {"device_evidence_list": [device]}})
        guest = client(broker, additional=lambda digest: many)
        assert guest.refused(guest.handshake) == malformed


@pytest.mark.threat("B16")
def test_requests_that_are_too_large(place: Place) -> None:
    with running(place) as broker:
        guest = client(broker)
        guest.auth()
        body = b'{"runtime-data": "' + b"x" * ServerLimits().body_bytes + b'"}'
        try:
            refused = guest.refused(lambda: guest.attest(body))
        except (ConnectionError, BrokenPipeError):
            return  # the broker closed the connection during the request
        assert refused == (413, "PluginInternalError", "broker.request_too_large")
