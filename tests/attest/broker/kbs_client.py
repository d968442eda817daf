"""A KBS client written from the protocol's text (version 0.4), without any code of sealring.

HTTP and TLS are Python's own, JSON is canonical after RFC 8785, and a JWE is opened as in RFC 7516
and RFC 7518. Like guest-components' client it keeps cookies, and authenticates a JWE's header as it
would write the header itself: alg, enc, then the other fields by name.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

Prove = Callable[[bytes], dict[str, Any]]
"""Makes the evidence for a digest, in the TEE's JSON form."""
COOKIE = "kbs-session-id"
ERRORS = "https://github.com/confidential-containers/kbs/errors/"
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


@dataclass
class KbsRefusal(Exception):
    status: int
    type: str
    detail: str
    error: str


@dataclass
class Answer:
    status: int
    body: bytes

    def good(self) -> Any:
        value = json.loads(self.body)
        if self.status != 200:
            assert value["type"].startswith(ERRORS)
            kind = value["type"].removeprefix(ERRORS)
            raise KbsRefusal(self.status, kind, value["detail"], value["error"])
        return value


@dataclass
class KbsClient:
    port: int
    authority: Path
    tee: str
    prove: Prove
    additional: Callable[[bytes], str] = lambda digest: ""
    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    version: str = "0.4.0"
    cookie: str = ""
    token: str = ""

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        context = ssl.create_default_context(cafile=str(self.authority))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, context=context, timeout=60
        )
        sent = {"Content-Type": "application/json"}
        if self.cookie:
            sent["Cookie"] = f"{COOKIE}={self.cookie}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            for given in response.headers.get_all("set-cookie") or []:
                parsed = SimpleCookie(given)
                assert parsed[COOKIE]["path"] == "/kbs/v0"
                assert parsed[COOKIE]["secure"]
                assert parsed[COOKIE]["httponly"]
                self.cookie = parsed[COOKIE].value
            return Answer(response.status, response.read())
        finally:
            connection.close()

    def auth(self, **changes: Any) -> str:
        known = {"supported-hash-algorithms": ["Sha256", "Sha384", "Sha512"]}
        body = {"version": self.version, "tee": self.tee, "extra-params": known} | changes
        challenge = self.ask("POST", "/kbs/v0/auth", body).good()
        extra = challenge["extra-params"]
        assert not extra or extra["selected-hash-algorithm"] == "sha384"
        return str(challenge["nonce"])

    def attestation(self, nonce: str) -> dict[str, Any]:
        runtime = {"nonce": nonce, "tee-pubkey": public_jwk(self.key)}
        additional = self.additional(hashlib.sha384(canonical(runtime)).digest())
        bound = canonical({**runtime, "additional-evidence": additional})
        return {
            "init-data": None,
            "runtime-data": runtime,
            "tee-evidence": {
                "primary_evidence": self.prove(hashlib.sha384(bound).digest()),
                "additional_evidence": additional,
            },
        }

    def attest(self, body: Any) -> None:
        self.token = self.ask("POST", "/kbs/v0/attest", body).good()["token"]

    def handshake(self) -> None:
        self.attest(self.attestation(self.auth()))

    def fetch(self, path: str, *, token: bool = False) -> bytes:
        """Fetches a resource by the cookie, or by the token alone."""
        headers = {"Authorization": f"Bearer {self.token}", "Cookie": ""} if token else {}
        answer = self.ask("GET", f"/kbs/v0/resource/{path}", headers=headers)
        return open_jwe(answer.good(), self.key)

    def refused(self, act: Callable[[], Any]) -> tuple[int, str, str]:
        with pytest.raises(KbsRefusal) as caught:
            act()
        assert caught.value.detail
        return caught.value.status, caught.value.type, caught.value.error


def public_jwk(key: Any) -> dict[str, str]:
    public = key.public_key()
    numbers = public.public_numbers()
    if isinstance(public, rsa.RSAPublicKey):
        parts = {"n": (numbers.n, public.key_size // 8), "e": (numbers.e, 3)}
        named = {"kty": "RSA", "alg": "RSA-OAEP-256"}
    else:
        size = (public.key_size + 7) // 8
        parts = {"x": (numbers.x, size), "y": (numbers.y, size)}
        curve = next(name for name, one in CURVES.items() if one.name == public.curve.name)
        named = {"kty": "EC", "crv": curve, "alg": "ECDH-ES+A256KW"}
    return named | {name: _text(n.to_bytes(size, "big")) for name, (n, size) in parts.items()}


def open_jwe(value: dict[str, str], key: Any) -> bytes:
    header = json.loads(_raw(value["protected"]))
    others = {name: header[name] for name in sorted(header) if name not in ("alg", "enc")}
    again = {"alg": header["alg"], "enc": header["enc"], **_sorted(others)}
    aad = _text(json.dumps(again, separators=(",", ":")).encode())
    wrapped = _raw(value["encrypted_key"])
    assert header["enc"] == "A256GCM"
    if header["alg"] == "RSA-OAEP-256":
        sha256 = hashes.SHA256()
        content_key = key.decrypt(wrapped, padding.OAEP(padding.MGF1(sha256), sha256, None))
    else:
        assert header["alg"] == "ECDH-ES+A256KW"
        point = header["epk"]
        numbers = [int.from_bytes(_raw(point[name]), "big") for name in ("x", "y")]
        theirs = ec.EllipticCurvePublicNumbers(*numbers, CURVES[point["crv"]]).public_key()  # type: ignore[arg-type, call-arg]
        name = header["alg"].encode()
        info = len(name).to_bytes(4, "big") + name + bytes(8) + (256).to_bytes(4, "big")
        shared = key.exchange(ec.ECDH(), theirs)
        wrapping = ConcatKDFHash(hashes.SHA256(), 32, info).derive(shared)
        content_key = aes_key_unwrap(wrapping, wrapped)
    sealed = _raw(value["ciphertext"]) + _raw(value["tag"])
    return AESGCM(content_key).decrypt(_raw(value["iv"]), sealed, aad.encode())


def canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return value


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _raw(text: str) -> bytes:
    assert "=" not in text
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
