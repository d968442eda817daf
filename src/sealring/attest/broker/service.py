"""The broker without a network: nonce, evidence, verdict, certificate, data keys.

Each step ends in one commit or none:

    challenge   writes nothing
    attest      one commit: nonce used, verdict logged, rank taken. Then the token is signed.
                Evidence that does not pass the policy writes nothing (strangers.py)
    resource    the certificate is signed. One commit: token used, gift logged. Then it is sent

If the broker is killed between two steps, nothing is given twice: a rank's holder is a key, and
only that key gets more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.broker import audit, ledger, strangers, tokens
from sealring.attest.broker.clock import SteadyClock, boottime
from sealring.attest.broker.envelopes import seal
from sealring.attest.broker.keys import BrokerKeys, DataKeys, issue_to_worker
from sealring.attest.broker.ledger import Applicant, JobLedger
from sealring.attest.broker.messages import (
    LEAVE_PROOF,
    AttestRequest,
    GuestAttestation,
    check_signed,
    kind_of,
    parse_auth,
    parse_json,
    parse_read,
    parse_record,
    read_attestation,
    read_guest_attestation,
)
from sealring.attest.broker.store import LedgerStore, Row, StoreView
from sealring.attest.broker.strangers import Strangers
from sealring.attest.broker.tokens import (
    GuestGrant,
    TokenGrant,
    challenge_of,
    check_token,
    credential_for,
    make_token,
)
from sealring.attest.evidence import (
    AttestedWorker,
    Policy,
    Trust,
    judge,
    parse_evidence,
    verify_evidence,
)
from sealring.attest.evidence.agent_evidence import HASH, devices_of, evidence_of
from sealring.attest.evidence.policy import granted
from sealring.attest.evidence.worker import encode_claims
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    AttestationError,
    AttestationUnavailable,
    BrokerError,
    BrokerRefusal,
    MalformedRequest,
    SealringError,
    TamperedStore,
    UntrustedChain,
)
from sealring.formats.log.broker_entries import CERTIFICATE

_LOG = logging.getLogger("sealring.attest.broker")
_VERIFYING_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class BrokerRules:
    """What the job's owner decided, and what evidence is checked against."""

    policy: Policy
    policy_digest: str
    trust: Callable[[], Trust]
    keys_directory: Path | None = None
    """The directory of the data keys: repository/type/tag, each a private file."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A worker that passed the policy."""

    worker: AttestedWorker
    digest: str
    """SHA-256 of the evidence."""
    made: int
    """When its nonce was made."""
    now: float

    @property
    def machines(self) -> tuple[str, ...]:
        machine = self.worker.machine
        return (machine, *self.worker.also_known_as) if machine else ()


class Broker:
    def __init__(
        self,
        keys: BrokerKeys,
        store: LedgerStore,
        rules: BrokerRules,
        wall: Callable[[], float] = time.time,
        boottime: Callable[[], float] = boottime,
    ) -> None:
        self._keys = keys
        self._store = store
        self._rules = rules
        made = keys.authority.not_valid_before_utc.timestamp()
        self._clock = SteadyClock(wall, boottime, made)
        self._ledger = JobLedger(keys.audit_key, rules.policy.rejoins)
        self.strangers = Strangers(socket.gethostname(), self._clock())
        self._threads = ThreadPoolExecutor(_VERIFYING_THREADS, "sealring-verify")
        self._data_keys = DataKeys(rules.keys_directory)

    async def open(self) -> None:
        """Called before anything is answered. Fails if the store is missing or is not ours."""
        self._clock.start_after(await self._store.transact(audit.newest_time))

    async def challenge(self, request: bytes) -> tuple[str, bytes, dict[str, Any]]:
        """Returns a session, its nonce, and the challenge's extra parameters."""
        asked = parse_auth(request)
        session = tokens.new_session(asked.tee)
        nonce = tokens.make_nonce(self._keys.nonce_key, session, self._clock())
        if asked.hashes is not None:
            return session, nonce, _chosen_hash(asked.hashes)
        introduction = asked.introduction
        if not introduction:
            return session, nonce, {}
        extra = await asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: credential_for(introduction, self._keys.nonce_key, nonce, self._trust()),
        )
        return session, nonce, extra

    async def attest(self, session: str, request: bytes) -> str:
        """Checks evidence and returns a token."""
        fields = parse_json(request)
        if "signature" not in fields:
            return await self._attest_guest(session, read_guest_attestation(fields))
        sent = read_attestation(fields)
        name, key = sent.name, hashlib.sha256(sent.public_key).hexdigest()
        seen = await self._verify(session, sent.nonce, partial(self._judge, sent))
        facts = self._facts(seen.worker, seen.digest)
        label = seen.worker.label
        applicant = Applicant(name, sent.world, key, seen.machines, label, facts)
        nonce = sent.nonce.hex()
        await self._decide(
            lambda view: self._ledger.admit(view, nonce, seen.made, seen.now, applicant)
        )
        _LOG.info("admitted rank %d of %s (%s)", name.rank, name.job, label)
        claims = facts["claims_digest"]
        ours = {"name": name.uri, "world": sent.world, "key": key, "claims": claims}
        return self._token(seen, sent.jwk, ours)

    async def _attest_guest(self, session: str, sent: GuestAttestation) -> str:
        """Attests a stock KBS client. Its session is open from then on."""
        kind, nonce = kind_of(tokens.tee_in(session)), sent.challenge.nonce
        seen = await self._verify(session, nonce, partial(self._judge_guest, kind, sent))
        guest = {
            "session": tokens.digest_of(session),
            "jwk": sent.jwk,
            "key": hashlib.sha256(sent.challenge.public_key).hexdigest(),
            "machines": list(seen.machines),
            "kind": kind,
            "label": seen.worker.label,
        }
        await self._decide(
            lambda view: self._ledger.admit_guest(
                view, nonce.hex(), seen.made, seen.now, guest, seen.digest
            )
        )
        _LOG.info("attested a guest (%s)", seen.worker.label)
        return self._token(seen, sent.jwk, {"session": guest["session"]})

    async def _verify(
        self, session: str, nonce: bytes, judge_it: Callable[[], tuple[AttestedWorker, str]]
    ) -> _Seen:
        """Checks evidence for a nonce of this session. A nonce that failed cannot be used again."""
        now, seconds = self._clock(), self._rules.policy.nonce_seconds
        made = tokens.check_nonce(self._keys.nonce_key, session, nonce, now, seconds)
        self.strangers.require_unused(nonce)
        try:
            loop = asyncio.get_running_loop()
            worker, digest = await loop.run_in_executor(self._threads, judge_it)
        except AttestationError:
            self.strangers.use_nonce(nonce)
            raise
        return _Seen(worker, digest, made, now)

    async def _decide(self, decide: Callable[[StoreView], T | BrokerError]) -> T:
        """Commits a decision and returns it. Raises a refusal, which is then in the audit log."""
        found = await self._store.transact(decide)
        if isinstance(found, BrokerError):
            # The audit log has this refusal, so nothing else needs to count it.
            _LOG.warning("refused: %s", found)
            found.audited = True
            raise found
        return found

    def _token(self, seen: _Seen, jwk: dict[str, str], ours: dict[str, Any]) -> str:
        digest = self._rules.policy_digest
        return make_token(self._keys, seen.worker, jwk, digest, seen.now, ours)

    async def resource(self, token: str, path: str) -> dict[str, str]:
        """Return a resource that the token's holder may have, encrypted to the holder's key."""
        now = self._clock()
        grant = check_token(self._keys, token, now)
        if isinstance(grant, GuestGrant):
            return await self._resource_of_guest(grant.session, path)
        if path == CERTIFICATE:
            return seal(await self._certificate(grant, now), grant.jwk)
        content = self._data_keys.read(path)

        def objection(holder: Row) -> BrokerError | None:
            return self._objection(path, content, holder["facts"]["kind"], grant.name.rank)

        await self._decide(
            lambda view: self._ledger.spend(view, grant, path, now, objection=objection)
        )
        assert isinstance(content, bytes)
        return seal(content, grant.jwk)

    async def resource_of_session(self, session: str, path: str) -> dict[str, str]:
        """Return a data key to the stock KBS client that attested in this session."""
        return await self._resource_of_guest(tokens.digest_of(session), path)

    async def _resource_of_guest(self, session: str, path: str) -> dict[str, str]:
        """Return a data key, encrypted to the guest's key. `session` is the session's hash."""
        now = self._clock()
        # An unknown session is refused before the path is looked at and the disk is read.
        row = await self._store.transact(lambda view: ledger.find_session(view, session, now))
        content = self._data_keys.read(path)
        objection = self._objection(path, content, row["kind"], None)
        await self._decide(
            lambda view: self._ledger.give_guest(view, session, path, now, objection)
        )
        assert isinstance(content, bytes)
        return seal(content, row["jwk"])

    def _objection(
        self, path: str, content: bytes | BrokerError, kind: str, rank: int | None
    ) -> BrokerError | None:
        """Why a worker, or a guest without a rank, does not get this data key."""
        if path not in granted(self._rules.policy, kind, rank):
            whom = "guest" if rank is None else "worker"
            return BrokerRefusal(
                f"the policy does not grant {path} to this {whom}",
                code="broker.resource_not_granted",
            )
        return content if isinstance(content, BrokerError) else None

    async def keys_out(self, job: str) -> list[str]:
        now = self._clock()
        return await self._store.transact(lambda view: ledger.keys_to_leave(view, job, now))

    async def holders(self) -> list[tuple[WorkerName, Row, bool]]:
        """Every rank's holder, and whether it is out."""

        def read(view: StoreView) -> list[tuple[WorkerName, Row, bool]]:
            found = ledger.holders(view)
            out = {job: set(ledger.keys_out(view, job)) for job in {name.job for name, _ in found}}
            return [(name, row, row["key"] in out[name.job]) for name, row in found]

        return await self._store.transact(read)

    def check_data_keys(self) -> None:
        """Called at the start: raises if a data key exists and cannot be used."""
        self._data_keys.check(rule.path for rule in self._rules.policy.resources)

    async def leave(self, request: bytes) -> None:
        """A worker that ends gives its rank back."""
        (name, key, _), now = check_signed(request, LEAVE_PROOF), self._clock()
        await self._store.transact(lambda view: self._ledger.leave(view, now, name, key))

    async def read_vault(self, request: bytes) -> Row:
        """The records that the worker's job has of a vault."""
        asked, now = parse_read(request), self._clock()
        return await self._store.transact(lambda view: ledger.read_vault(view, now, asked))

    async def record_vault(self, request: bytes) -> Row:
        asked, now = parse_record(request), self._clock()
        return await self._store.transact(lambda view: self._ledger.record_vault(view, now, asked))

    async def refused(self) -> dict[str, Any]:
        """The requests that were refused before anything was proven."""
        await self.keep_refusals()
        return await self._store.transact(strangers.refused)

    async def keep_refusals(self) -> None:
        if (flush := self.strangers.flush()) is None:
            return
        try:
            await self._store.transact(flush.write)
        except SealringError:
            self.strangers.put_back(flush)
            raise

    async def sweep(self) -> int:
        now = self._clock()
        return await self._store.transact(lambda view: ledger.sweep(view, now))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _trust(self) -> Trust:
        """The trust at the broker's own time: setting the clock back makes no ended chain valid."""
        trust = self._rules.trust()
        return replace(trust, now=max(trust.now, datetime.fromtimestamp(self._clock(), UTC)))

    def _judge(self, sent: AttestRequest) -> tuple[AttestedWorker, str]:
        evidence = parse_evidence(sent.evidence)
        challenge = challenge_of(evidence, self._keys.nonce_key, sent.nonce, sent.public_key)
        worker = verify_evidence(evidence, challenge, self._trust())
        judge(self._rules.policy, worker, sent.name.rank, sent.name.job).require()
        return worker, hashlib.sha256(evidence.encode()).hexdigest()

    def _judge_guest(self, kind: str, sent: GuestAttestation) -> tuple[AttestedWorker, str]:
        if not granted(self._rules.policy, kind, None):
            raise BrokerRefusal(
                f"the policy grants nothing to {kind} guests that are no rank of a job: "
                "[[resources]] with guests = true does",
                code="broker.resource_not_granted",
            )
        trust = self._trust()
        devices = devices_of(sent.additional)
        try:
            evidence = evidence_of(kind, sent.primary, sent.challenge, devices, trust.issuers)
        except AttestationUnavailable:
            raise UntrustedChain(
                "the client did not send the certificates of its chip and of all issuers, and the "
                "broker does not have them: put AMD's cert_chain into --cache, as a .pem file"
            ) from None
        # Encoded as workers send it, so that the same limits apply.
        evidence = parse_evidence(evidence.encode())
        worker = verify_evidence(evidence, sent.challenge, trust)
        judge(self._rules.policy, worker, None).require()
        return worker, hashlib.sha256(evidence.encode()).hexdigest()

    def _facts(self, worker: AttestedWorker, digest: str) -> Row:
        ima = self._rules.policy.kinds[worker.kind].get("ima")
        rules = ima.digest if ima is not None else ""
        claims = encode_claims(worker, digest, self._rules.policy_digest, rules)
        return {
            "worker": worker.as_json(),
            "kind": worker.kind,
            "evidence": digest,
            "claims": claims.decode(),
            "claims_digest": hashlib.sha256(claims).hexdigest(),
            "chain_until": worker.not_after.timestamp(),
            "public_key": worker.challenge.public_key.hex(),
        }

    async def _certificate(self, grant: TokenGrant, now: float) -> bytes:
        minutes = self._rules.policy.certificate_minutes

        def decide(view: StoreView) -> tuple[Row, list[str]] | BrokerError:
            row = self._ledger.spend(view, grant, CERTIFICATE, now, minutes=minutes)
            if isinstance(row, BrokerError):
                return row
            return row, ledger.keys_to_leave(view, grant.name.job, now)

        row, out = await self._decide(decide)
        # Signed after the commit, for the key and the claims that the token was issued for.
        facts = row["facts"]
        public_key, claims = bytes.fromhex(facts["public_key"]), facts["claims"].encode()
        if (
            hashlib.sha256(public_key).hexdigest() != grant.key
            or hashlib.sha256(claims).hexdigest() != grant.claims
        ):
            raise TamperedStore("a row of the store is not what was attested")
        issued = datetime.fromtimestamp(now, UTC)
        certificate = issue_to_worker(
            self._keys,
            public_key,
            grant.name,
            row["world"],
            claims,
            minutes,
            datetime.fromtimestamp(facts["chain_until"], UTC),
            issued,
        )
        return json.dumps(
            {
                "certificate": certificate.public_bytes(Encoding.PEM).decode(),
                # A worker whose clock may be wrong counts these seconds from its request.
                "seconds": (certificate.not_valid_after_utc - issued).total_seconds(),
                "out": out,
                "resources": granted(self._rules.policy, facts["kind"], grant.name.rank),
            }
        ).encode()


def _chosen_hash(known: list[Any]) -> dict[str, str]:
    """The hash that binds a stock KBS client's evidence. A client that lacks it is refused."""
    if HASH not in [str(one).lower() for one in known]:
        raise MalformedRequest(f"this broker wants evidence that is bound by {HASH}")
    return {"selected-hash-algorithm": HASH}
