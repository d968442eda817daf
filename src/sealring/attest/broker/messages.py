"""The messages between a client and a broker: the JSON of the KBS protocol.

POST /kbs/v0/auth      {"version", "tee", "extra-params"}            -> {"nonce", "extra-params"}
POST /kbs/v0/attest    {"runtime-data", "tee-evidence", "signature"} -> {"token"}
GET  /kbs/v0/resource/<repository>/<type>/<tag>                      -> JWE

`runtime-data` also says which worker the client wants to be. It is signed by the key that the
evidence is bound to. So the attested key vouches for all of it, and the client is shown to hold
that key. A request without a signature is a stock KBS client's (`read_guest_attestation`).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
)

from sealring import errors
from sealring.attest.broker.envelopes import check_guest_jwk, check_jwk
from sealring.attest.evidence.agent_evidence import GuestChallenge, guest_challenge
from sealring.attest.evidence.encoding import from_base64, from_hex, to_base64
from sealring.core.hooks import VaultEntry
from sealring.core.identity.loading import public_key_from_der
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    AttestationError,
    BrokerError,
    ConfigurationError,
    MalformedRequest,
    SealringError,
)
from sealring.formats.http import Response
from sealring.formats.strict import read_json, read_object
from sealring.limits import MAX_WORLD

PROTOCOL: Final = "0.4.0"
AUTH, ATTEST, RESOURCE = "/kbs/v0/auth", "/kbs/v0/attest", "/kbs/v0/resource/"
OUT: Final = "/sealring/v0/out/"
"""GET: the keys that are out of a job."""
LEAVE: Final = "/sealring/v0/leave"
"""POST: a worker that ends gives its rank back."""
COOKIE: Final = "kbs-session-id"
HASHES: Final = "supported-hash-algorithms"
_PROOF: Final = b"sealring-1 join\0"
LEAVE_PROOF: Final = b"sealring-1 leave\0"
_TEE: Final = re.compile(r"[a-z0-9-]{1,32}")
_TEES: Final = {"simulated": "sample"}
"""TEEs that the KBS protocol names otherwise than we do."""


def tee_of(kind: str) -> str:
    return _TEES.get(kind, kind)


@dataclass(frozen=True, slots=True)
class AttestRequest:
    nonce: bytes
    jwk: dict[str, str]
    name: WorkerName
    world: int
    public_key: bytes
    """An Ed25519 key, as DER."""
    evidence: bytes


def parse_json(data: bytes) -> dict[str, Any]:
    return read_object(data, MalformedRequest("the request is not a JSON object"))


def write_auth(kind: str, introduction: dict[str, Any]) -> bytes:
    tee = tee_of(kind)
    extra = (
        {"tee-metadata": {"primary_tee": {"tee": tee, "metadata": introduction}}}
        if introduction
        else {}
    )
    return json.dumps({"version": PROTOCOL, "tee": tee, "extra-params": extra}).encode()


@dataclass(frozen=True, slots=True)
class Auth:
    tee: str
    introduction: dict[str, Any]
    """What the TEE says of itself before it gets a challenge. Mostly empty."""
    hashes: list[Any] | None
    """The hash algorithms that a stock KBS client supports, if it lists them."""


def parse_auth(data: bytes) -> Auth:
    fields = exactly(parse_json(data), "version", "tee", "extra-params")
    if fields["version"] != PROTOCOL:
        raise MalformedRequest(f"this broker speaks version {PROTOCOL} of the KBS protocol")
    tee, extra = fields["tee"], fields["extra-params"]
    if not isinstance(tee, str) or not _TEE.fullmatch(tee):
        raise MalformedRequest("tee is a word")
    if extra in ({}, "", None):
        return Auth(tee, {}, None)
    if isinstance(extra, dict) and set(extra) == {HASHES}:
        if not isinstance(extra[HASHES], list):
            raise MalformedRequest(f"{HASHES} is a list")
        return Auth(tee, {}, extra[HASHES])
    metadata = exactly(extra, "tee-metadata")["tee-metadata"]
    if not isinstance(metadata, dict) or not isinstance(metadata.get("primary_tee"), dict):
        raise MalformedRequest("tee-metadata says what the primary_tee is")
    introduction = metadata["primary_tee"].get("metadata", {})
    if metadata["primary_tee"].get("tee") != tee or not isinstance(introduction, dict):
        raise MalformedRequest("primary_tee is the tee, with an object of metadata")
    return Auth(tee, introduction, None)


def write_attestation(
    nonce: bytes,
    jwk: dict[str, Any],
    name: WorkerName,
    world: int,
    key: Ed25519PrivateKey,
    evidence: bytes,
) -> bytes:
    runtime = {
        "nonce": to_base64(nonce),
        "tee-pubkey": jwk,
        "worker": {
            "name": name.uri,
            "world": world,
            "public-key": to_base64(
                key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            ),
        },
    }
    request = {
        "runtime-data": runtime,
        "tee-evidence": {
            "primary_evidence": read_json(evidence),
            "additional_evidence": "{}",
        },
        "signature": to_base64(key.sign(_PROOF + _canonical(runtime))),
    }
    return json.dumps(request).encode()


def parse_attestation(data: bytes) -> AttestRequest:
    return read_attestation(parse_json(data))


def read_attestation(value: dict[str, Any]) -> AttestRequest:
    fields = exactly(value, "runtime-data", "tee-evidence", "signature")
    runtime = exactly(fields["runtime-data"], "nonce", "tee-pubkey", "worker")
    worker = exactly(runtime["worker"], "name", "world", "public-key")
    shown = exactly(fields["tee-evidence"], "primary_evidence", "additional_evidence")
    if not isinstance(shown["primary_evidence"], dict) or shown["additional_evidence"] != "{}":
        raise MalformedRequest("all evidence is one object, in primary_evidence")
    public_key = read_base64(worker["public-key"])
    _check_proof(public_key, read_base64(fields["signature"]), _PROOF + _canonical(runtime))
    name, world = _name(worker["name"]), worker["world"]
    if type(world) is not int or not name.rank < world <= MAX_WORLD:
        raise MalformedRequest(f"rank {name.rank} does not exist in that world")
    return AttestRequest(
        nonce=read_base64(runtime["nonce"]),
        jwk=check_jwk(runtime["tee-pubkey"]),
        name=name,
        world=world,
        public_key=public_key,
        # The bytes that the worker encoded: Python keeps the order of fields and has one spelling.
        evidence=json.dumps(shown["primary_evidence"]).encode(),
    )


def write_signed(
    name: WorkerName, key: Ed25519PrivateKey, proof: bytes, ask: dict[str, Any] | None = None
) -> bytes:
    """A request of a worker that was admitted before. `proof` says what the signature is for.

    A request to leave needs no nonce: replaying it has no effect, because its key is out of the job
    after the first one.
    """
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    said = {"worker": {"name": name.uri, "public-key": to_base64(public)}, "ask": ask or {}}
    signature = to_base64(key.sign(proof + _canonical(said)))
    return json.dumps({**said, "signature": signature}).encode()


def check_signed(data: bytes, proof: bytes) -> tuple[WorkerName, str, Any]:
    """Checks the signature. Returns the worker, the digest of its public key, and its request."""
    said = exactly(parse_json(data), "worker", "ask", "signature")
    signature = read_base64(said.pop("signature"))
    named = exactly(said["worker"], "name", "public-key")
    public_key = read_base64(named["public-key"])
    _check_proof(public_key, signature, proof + _canonical(said))
    return _name(named["name"]), hashlib.sha256(public_key).hexdigest(), said["ask"]


def _check_proof(public_key: bytes, signature: bytes, signed: bytes) -> None:
    key = public_key_from_der(public_key, MalformedRequest("the worker's key cannot be read"))
    try:
        if not isinstance(key, Ed25519PublicKey):
            raise MalformedRequest("the worker's key is an Ed25519 key")
        canonical = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if canonical != public_key:
            raise MalformedRequest("the worker's key is not in its canonical form")
        key.verify(signature, signed)
    except InvalidSignature:
        raise MalformedRequest("the request is not signed by the worker's key") from None


def _name(value: Any) -> WorkerName:
    name = WorkerName.parse(value) if isinstance(value, str) else None
    if name is None:
        raise MalformedRequest("the worker's name is spiffe://sealring/<job>/rank/<n>")
    return name


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def exactly(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise MalformedRequest(f"here are the fields {', '.join(names)}, and no others")
    return value


def read_base64(value: Any) -> bytes:
    return from_base64(value, MalformedRequest("a field is not base64"))


def broker_urls(text: str) -> list[tuple[str, int]]:
    """The (host, port) pairs of `https://host:port[,https://host:port...]`."""
    found = []
    for url in text.split(","):
        try:
            parts = urlsplit(url.strip())
            port = parts.port or 8443
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigurationError(f"a broker is https://HOST[:PORT], and {url!r} is not")
        found.append((parts.hostname, port))
    return found


READ: Final = "/sealring/v0/vault/read"
RECORD: Final = "/sealring/v0/vault/record"
PAGE: Final = 1000
"""Objects in one answer."""
READ_PROOF: Final = b"sealring-1 vault read\0"
RECORD_PROOF: Final = b"sealring-1 vault record\0"
_LARGEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ReadVault:
    name: WorkerName
    key: str
    """The digest of the worker's public key."""
    vault: str
    after: str
    """The id of the last object of the page before. Empty for the first page."""


@dataclass(frozen=True, slots=True)
class RecordVault:
    name: WorkerName
    key: str
    vault: str
    number: int
    """The number of the vault's key."""
    generation: int
    entry: VaultEntry | None


def parse_read(data: bytes) -> ReadVault:
    name, key, ask = check_signed(data, READ_PROOF)
    fields = exactly(ask, "vault", "after")
    after = fields["after"]
    return ReadVault(name, key, _id(fields["vault"]), after if after == "" else _id(after))


def parse_record(data: bytes) -> RecordVault:
    name, key, ask = check_signed(data, RECORD_PROOF)
    fields = exactly(ask, "vault", "key", "generation", "entry")
    given, entry = fields["entry"], None
    if given is not None:
        entry = VaultEntry(**exactly(given, "object", "version", "manifest"))
        _id(entry.object)
        _number(entry.version)
        _hex(entry.manifest, "a manifest's digest", 32)
    vault, number = _id(fields["vault"]), _number(fields["key"])
    return RecordVault(name, key, vault, number, _number(fields["generation"]), entry)


def _id(value: Any) -> str:
    return _hex(value, "the id of a vault or of an object", 16)


def _hex(value: Any, what: str, size: int) -> str:
    return from_hex(value, size, MalformedRequest(f"{what} is {size} bytes in hex")).hex()


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedRequest("a key's number, a generation and a version count from 0")
    return value


_OLD_SPELLINGS: Final = {"azsnpvtpm": "az-snp-vtpm", "aztdxvtpm": "az-tdx-vtpm"}
"""Names that older clients use for a TEE."""


@dataclass(frozen=True, slots=True)
class GuestAttestation:
    challenge: GuestChallenge
    """The evidence must be bound to this. The nonce in it must have come from this broker."""
    jwk: dict[str, str]
    primary: dict[str, Any]
    additional: str


def read_guest_attestation(fields: dict[str, Any]) -> GuestAttestation:
    if "init-data" in fields:
        fields = dict(fields)
        init = fields.pop("init-data")
        if init is not None:
            values = exactly(init, "format", "body").values()
            if not all(isinstance(one, str) for one in values):
                raise MalformedRequest("init-data has a format and a body, both texts")
    exactly(fields, "runtime-data", "tee-evidence")
    runtime = exactly(fields["runtime-data"], "nonce", "tee-pubkey")
    shown = exactly(fields["tee-evidence"], "primary_evidence", "additional_evidence")
    primary, additional = shown["primary_evidence"], shown["additional_evidence"]
    if not isinstance(primary, dict) or not isinstance(additional, str):
        raise MalformedRequest("primary_evidence is an object, and additional_evidence a text")
    jwk = check_guest_jwk(runtime["tee-pubkey"])
    nonce = read_base64(runtime["nonce"])
    try:
        challenge = guest_challenge(nonce, runtime["nonce"], jwk, additional)
    except ValueError:
        raise MalformedRequest("a text of the request has no encoding") from None
    return GuestAttestation(challenge, jwk, primary, additional)


def kind_of(tee: str) -> str:
    """The kind of evidence for a client's name of its TEE."""
    return _OLD_SPELLINGS.get(tee, tee)


_TYPE: Final = "https://github.com/confidential-containers/kbs/errors/"
_KBS: Final = "/kbs/v0/"
_MAX_TEXT: Final = 600
_OTHER_TYPE: Final = "PluginInternalError"
_ANSWERS: Final[dict[str, tuple[int, str]]] = {
    "broker.malformed_request": (400, "SerdeError"),
    "broker.unknown_nonce": (401, "AttestationError"),
    "broker.expired_nonce": (401, "AttestationError"),
    "broker.reused_nonce": (401, "AttestationError"),
    "broker.unknown_token": (401, "TokenNotFound"),
    "broker.expired_token": (401, "TokenVerifierError"),
    "broker.reused_token": (401, "TokenVerifierError"),
    "broker.rank_taken": (403, "PolicyDeny"),
    "broker.worker_revoked": (403, "PolicyDeny"),
    "broker.resource_not_granted": (403, "PolicyDeny"),
    "broker.too_many_records": (403, _OTHER_TYPE),
    "broker.no_such_resource": (404, "InvalidRequestPath"),
    "broker.request_too_slow": (408, _OTHER_TYPE),
    "broker.recorded_otherwise": (409, _OTHER_TYPE),
    "broker.request_too_large": (413, _OTHER_TYPE),
    "broker.too_many_requests": (429, _OTHER_TYPE),
    "broker.misconfigured": (500, _OTHER_TYPE),
    "broker.store_unavailable": (503, _OTHER_TYPE),
}
"""The HTTP status and the KBS protocol's error type for each error code."""
_REFUSALS: Final = frozenset(
    code
    for code, kind in errors.classes_by_code().items()
    if issubclass(kind, BrokerError | AttestationError)
)


def response_of(error: SealringError, path: str = "") -> Response:
    """The answer for an error. `path` is the requested one: the KBS protocol has no status 400."""
    if isinstance(error, errors.PolicyRefusal):
        status, kind = 403, "PolicyDeny"
    elif isinstance(error, AttestationError):
        status, kind = 401, "AttestationError"
    elif error.code in _ANSWERS:
        status, kind = _ANSWERS[error.code]
    else:
        # An internal fault is only for the broker's own log.
        error = BrokerError("the broker failed: see its log")
        status, kind = 500, _OTHER_TYPE
    if status == 400 and path.startswith(_KBS):
        status = 401
    content = {"type": _TYPE + kind, "detail": _clean(str(error)), "error": error.code}
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(status, json.dumps(content).encode(), headers=headers)


def error_of(response: Response, where: str) -> SealringError:
    """The error that a broker's answer stands for. The broker can only choose one of ours."""
    try:
        value: Any = read_json(response.body)
        code, detail = value["error"], value["detail"]
    except (ValueError, KeyError, TypeError):
        code = detail = None
    if not isinstance(code, str) or not isinstance(detail, str):
        return malformed(where, f"answered {response.status} and no reason")
    known = code if code in _REFUSALS else BrokerError.code
    return errors.classes_by_code()[known](
        f"the broker at {where} says: {_clean(detail)}", code=known
    )


def malformed(where: str, did: str) -> BrokerError:
    """An error for an answer that breaks the protocol. `did` says what the broker did."""
    return BrokerError(f"the broker at {where} {did}", code="broker.malformed_answer")


def _clean(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
