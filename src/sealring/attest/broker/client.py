"""The worker's side of the broker protocol: nonce, evidence, certificate and data keys."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.broker.clock import boottime
from sealring.attest.broker.envelopes import new_key, open_envelope, public_jwk
from sealring.attest.broker.messages import (
    ATTEST,
    AUTH,
    COOKIE,
    LEAVE,
    LEAVE_PROOF,
    OUT,
    PAGE,
    READ,
    READ_PROOF,
    RECORD,
    RECORD_PROOF,
    RESOURCE,
    error_of,
    malformed,
    write_attestation,
    write_auth,
    write_signed,
)
from sealring.attest.broker.tls import Client, client_context, connect
from sealring.attest.evidence.admission import public_key_of
from sealring.attest.evidence.attesters import Attester
from sealring.attest.evidence.encoding import from_base64
from sealring.attest.evidence.evidence import NONCE_BYTES
from sealring.core.hooks import VaultEntry
from sealring.core.identity.certificates import claims_of
from sealring.core.identity.loading import certificate_from_pem
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
)
from sealring.formats.http import Response
from sealring.formats.log.broker_entries import CERTIFICATE
from sealring.formats.strict import read_json, read_object, strictly

_LOG = logging.getLogger("sealring")
_AGAIN: Final = {"broker.reused_nonce", *BrokerUnavailable.codes}
"""Errors after which another attempt, or another replica, may succeed. A nonce counts as used if a
broker was lost between its commit and its answer."""
_ANSWER_SECONDS: Final = 60.0
"""The time limit for the TLS handshake, and for each answer. It is long, because a broker that many
workers ask at once is slow, and asking it again would only add to its load."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_LONGEST_LIFE: Final = 86400.0
"""The longest life of a certificate that a policy can set."""
_SAID_AFTER: Final = 1.0
_SAID_AGAIN: Final = 15.0
"""Seconds after which a waiting worker logs that it waits, and logs it again."""


T = TypeVar("T")
Conversation: TypeAlias = Callable[[Client, str], Awaitable[T]]
"""A function that makes requests over one connection. Takes the client and the broker's address."""


@dataclass(frozen=True, slots=True)
class Joined:
    certificate: x509.Certificate
    boottime_end: float
    """The certificate's end by CLOCK_BOOTTIME, counted from the moment before the broker was asked.
    It does not depend on this machine's wall clock."""
    evidence: bytes
    keys_out: frozenset[str]
    data_keys: dict[str, bytes] = field(repr=False)


class BrokerClient:
    def __init__(
        self, brokers: Sequence[tuple[str, int]], authorities: Sequence[x509.Certificate]
    ) -> None:
        self._brokers = list(brokers)
        self._context = client_context(authorities)
        self._reached: str | None = None
        """The network address at which the first broker of the list was reached, if it was."""

    async def join(
        self,
        name: WorkerName,
        world: int,
        key: Ed25519PrivateKey,
        attester: Attester,
        deadline_seconds: float,
    ) -> Joined:
        """Attests, and returns what the policy grants."""
        told = f"rank {name.rank} tries again to join"
        return await self.ask(joining(name, world, key, attester), deadline_seconds, told)

    async def leave(
        self, name: WorkerName, key: Ed25519PrivateKey, deadline_seconds: float
    ) -> None:
        """Gives the rank back. Needs no name server and no thread: at exit there may be none."""

        async def leaving(client: Client, where: str) -> None:
            answer_of(await client.ask("POST", LEAVE, write_signed(name, key, LEAVE_PROOF)), where)

        deadline = asyncio.get_running_loop().time() + deadline_seconds
        await self._call(leaving, deadline, self._reached)

    async def keys_out(
        self, job: str, deadline_seconds: float, address: str | None = None
    ) -> frozenset[str]:
        """The keys that are out of the job. `address`: where the first broker listens."""

        async def asking(client: Client, where: str) -> frozenset[str]:
            return _keys(answer_of(await client.ask("GET", OUT + job), where).get("out"), where)

        deadline = asyncio.get_running_loop().time() + deadline_seconds
        return await self._call(asking, deadline, address)

    async def ask(
        self, conversation: Conversation[T], deadline_seconds: float, told: str = ""
    ) -> T:
        """Asks one broker after the other until one answers or the time is up.

        `told`: what the log says while this takes long.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = start + deadline_seconds
        pause, say_at = _FIRST_PAUSE, start + _SAID_AFTER
        while True:
            try:
                return await self._call(conversation, deadline)
            except BrokerError as error:
                if error.code not in _AGAIN:
                    raise
                # A random pause: many workers may have met the same trouble at the same time.
                wait = pause * (0.5 + random.random())  # noqa: S311
                if loop.time() + wait >= deadline:
                    raise
                if told and loop.time() + wait >= say_at:  # log before the pause, not after it
                    say_at = loop.time() + _SAID_AGAIN
                    left = deadline - loop.time()
                    level = _first_of_this_host()
                    _LOG.log(level, "sealring: %s, for %.0f s more: %s", told, left, error)
                if error.code != "broker.too_many_requests":
                    self._brokers.append(self._brokers.pop(0))
                    self._reached = None
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _call(
        self, conversation: Conversation[T], deadline: float, address: str | None = None
    ) -> T:
        """Asks the first broker. `address` is its network address, if that is known already."""
        host, port = self._brokers[0]
        where = f"{host}:{port}"
        loop = asyncio.get_running_loop()

        def ends() -> float:
            return min(deadline, loop.time() + _ANSWER_SECONDS)

        try:
            async with asyncio.timeout_at(ends()) as limit:
                stream = await connect(host, port, self._context, address)
                self._reached = stream.address
                client = Client(stream, where, lambda: limit.reschedule(ends()))
                limit.reschedule(ends())
                try:
                    found = await conversation(client, where)
                except BaseException:
                    client.abort()
                    raise
                client.close()
                return found
        except TimeoutError:
            raise BrokerUnavailable(
                f"the broker at {where} did not answer in time", code="broker.unreachable"
            ) from None


def joining(
    name: WorkerName, world: int, key: Ed25519PrivateKey, attester: Attester
) -> Conversation[Joined]:
    async def run(client: Client, where: str) -> Joined:
        # A new key for each conversation: it cannot open what an earlier conversation received.
        envelope = new_key()
        introduction = await asyncio.to_thread(attester.introduce)
        response = await client.ask("POST", AUTH, write_auth(attester.kind, introduction))
        challenge = answer_of(response, where)
        nonce, extra = _nonce(challenge, where), challenge.get("extra-params")
        cookie = {"cookie": _cookie(response, where)}

        public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        extra = extra if isinstance(extra, dict) else {}
        shown = await asyncio.to_thread(attester.attest, nonce, public, extra)
        evidence = shown.encode()
        body = write_attestation(nonce, public_jwk(envelope), name, world, key, evidence)
        token = answer_of(await client.ask("POST", ATTEST, body, cookie), where).get("token")
        if not isinstance(token, str):
            raise malformed(where, "gave no token")
        bearer = {"authorization": f"Bearer {token}"}

        async def fetch(path: str) -> bytes:
            response = await client.ask("GET", RESOURCE + path, headers=bearer)
            return open_envelope(answer_of(response, where), envelope)

        asked = boottime()
        given = read_json(await fetch(CERTIFICATE))
        data_keys = {path: await fetch(path) for path in given.get("resources", [])}
        return Joined(
            _checked(given.get("certificate"), public, name, where),
            asked + _seconds(given.get("seconds"), where),
            evidence,
            _keys(given.get("out"), where),
            data_keys,
        )

    return run


def _checked(pem: Any, public: bytes, name: WorkerName, where: str) -> x509.Certificate:
    refusal = malformed(where, "gave no certificate")
    if not isinstance(pem, str):
        raise refusal
    certificate = certificate_from_pem(pem.encode(errors="replace"), refusal)
    try:
        named = claims_of(certificate).name
    except ValueError:
        named = None
    if public_key_of(certificate) != public or named != name:
        raise malformed(where, "gave another worker's certificate")
    return certificate


def _first_of_this_host() -> int:
    """The log level: WARNING for the host's first worker, DEBUG for the others, which repeat it."""
    return logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG


def _seconds(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_LIFE:
        raise malformed(where, "did not say how long the certificate lives")
    return float(value)


def answer_of(response: Response, where: str) -> dict[str, Any]:
    if response.status != 200:
        raise error_of(response, where)
    refusal = malformed(where, "did not answer with JSON")
    return read_object(response.body, refusal)


def _nonce(answer: dict[str, Any], where: str) -> bytes:
    refusal = malformed(where, "gave no nonce")
    nonce = from_base64(answer.get("nonce"), refusal)
    if len(nonce) != NONCE_BYTES:
        raise refusal
    return nonce


def _cookie(response: Response, where: str) -> str:
    first = response.headers.get("set-cookie", "").partition(";")[0]
    if not first.startswith(f"{COOKIE}="):
        raise malformed(where, "opened no session")
    return first


def _keys(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(key, str) for key in value):
        raise malformed(where, "did not say who is out")
    return frozenset(value)


@dataclass(frozen=True, slots=True)
class Answered:
    """The broker's records of a vault: a page of them, or those that it recorded just now."""

    key: int
    generation: int
    entries: list[VaultEntry]


def ask_vault(name: WorkerName, key: Ed25519PrivateKey, vault: str) -> Conversation[Answered]:
    """Reads all records of a vault, page by page."""

    async def run(client: Client, where: str) -> Answered:
        entries: list[VaultEntry] = []
        while True:
            asked = {"vault": vault, "after": entries[-1].object if entries else ""}
            body = write_signed(name, key, READ_PROOF, asked)
            page = _answered(answer_of(await client.ask("POST", READ, body), where), where)
            if entries and page.entries and page.entries[0].object <= entries[-1].object:
                raise malformed(where, "repeats records of a vault")
            entries += page.entries
            if len(page.entries) < PAGE:
                return Answered(page.key, page.generation, entries)

    return run


def tell_vault(
    name: WorkerName,
    key: Ed25519PrivateKey,
    vault: str,
    number: int,
    generation: int,
    entry: VaultEntry | None,
) -> Conversation[Answered]:
    """Records the newest header and, if given, the newest version of an object."""
    told = {
        "vault": vault,
        "key": number,
        "generation": generation,
        "entry": None if entry is None else asdict(entry),
    }

    async def run(client: Client, where: str) -> Answered:
        body = write_signed(name, key, RECORD_PROOF, told)
        return _answered(answer_of(await client.ask("POST", RECORD, body), where), where)

    return run


def _answered(answer: dict[str, Any], where: str) -> Answered:
    try:
        answered: Answered = strictly(Answered, answer, where, "record of a vault")
    except ConfigurationError as problem:
        raise malformed(where, f"gave no record of a vault: {problem}") from None
    return answered
