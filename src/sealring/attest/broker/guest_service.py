"""The broker for stock KBS clients: evidence in guest-components' form, and plain resources.

The same verifiers, policy, store and log as for workers. A guest joins no job and gets no
certificate: it gets the data keys that the policy grants to guests, sealed to the key that its
evidence is bound to.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from sealring.attest.broker import guests, nonces
from sealring.attest.broker.data_keys import DataKeys
from sealring.attest.broker.envelopes import seal
from sealring.attest.broker.guest_messages import GuestAttestation, kind_of
from sealring.attest.broker.guests import Guest
from sealring.attest.broker.keys import BrokerKeys
from sealring.attest.broker.ledger import Ledger
from sealring.attest.broker.store import Store
from sealring.attest.broker.strangers import Strangers
from sealring.attest.broker.tokens import make_guest_token
from sealring.attest.evidence import (
    AttestedWorker,
    Policy,
    Trust,
    judge,
    parse_evidence,
    verify_evidence,
)
from sealring.attest.evidence.agent_evidence import devices_of, evidence_of
from sealring.attest.evidence.policy import granted_to_guests
from sealring.errors import (
    AttestationError,
    AttestationUnavailable,
    BrokerError,
    ResourceNotGranted,
    UntrustedChain,
)

_LOG = logging.getLogger("sealring.attest.broker")


class GuestService:
    def __init__(
        self,
        keys: BrokerKeys,
        store: Store,
        ledger: Ledger,
        policy: Policy,
        policy_digest: str,
        trust: Callable[[], Trust],
        data_keys: DataKeys,
        strangers: Strangers,
        threads: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._keys, self._store, self._ledger = keys, store, ledger
        self._policy, self._policy_digest, self._trust = policy, policy_digest, trust
        self._data_keys, self._strangers = data_keys, strangers
        self._threads, self._clock = threads, clock

    async def attest(self, session: str, sent: GuestAttestation) -> str:
        """Evidence in, a token out; the session is open from then on."""
        now, nonce = self._clock(), sent.challenge.nonce
        seconds = self._policy.nonce_seconds
        made = nonces.check_nonce(self._keys.nonce_key, session, nonce, now, seconds)
        self._strangers.require_unused(nonce)
        kind = kind_of(nonces.tee_in(session))
        if not granted_to_guests(self._policy, kind):
            raise ResourceNotGranted(
                f"the policy grants nothing to {kind} guests that are no rank of a job: "
                "[[resources]] with guests = true does"
            )
        try:
            worker, digest = await asyncio.get_running_loop().run_in_executor(
                self._threads, partial(self._judge, kind, sent)
            )
        except AttestationError:
            self._strangers.use_nonce(nonce)
            raise
        guest = Guest(
            session=guests.digest_of(session),
            jwk=sent.jwk,
            key=hashlib.sha256(sent.challenge.public_key).hexdigest(),
            machines=(worker.machine, *worker.also_known_as) if worker.machine else (),
            kind=kind,
            label=worker.label,
            evidence=digest,
        )
        refusal = await self._store.transact(
            lambda view: guests.admit(self._ledger, view, nonce.hex(), made, now, guest)
        )
        if refusal is not None:
            raise audited(refusal)
        _LOG.info("attested a guest (%s)", worker.label)
        return make_guest_token(
            self._keys, worker, guest.session, sent.jwk, self._policy_digest, now
        )

    async def resource(self, session: str, path: str) -> dict[str, str]:
        """One data key, sealed to the guest's key. `session` is the session's hash."""
        now = self._clock()
        # Nothing is read from the disk, and no path looked at, for a stranger.
        row = await self._store.transact(lambda view: guests.find(view, session, now))
        content = self._data_keys.read(path)
        objection: BrokerError | None = None
        if path not in granted_to_guests(self._policy, row["kind"]):
            objection = ResourceNotGranted(f"the policy does not grant {path} to this guest")
        elif isinstance(content, BrokerError):
            objection = content
        refusal = await self._store.transact(
            lambda view: guests.give(self._ledger, view, session, path, now, objection)
        )
        if refusal is not None:
            raise audited(refusal)
        assert isinstance(content, bytes)
        return seal(content, row["jwk"])

    def _judge(self, kind: str, sent: GuestAttestation) -> tuple[AttestedWorker, str]:
        trust = self._trust()
        devices = devices_of(sent.additional)
        try:
            evidence = evidence_of(kind, sent.primary, sent.challenge, devices, trust.issuers)
        except AttestationUnavailable:
            raise UntrustedChain(
                "the client did not send the certificates of its chip and of all issuers, and the "
                "broker does not have them: put AMD's cert_chain into --cache, as a .pem file"
            ) from None
        # In the form that workers send, and so within the same limits.
        evidence = parse_evidence(evidence.encode())
        worker = verify_evidence(evidence, sent.challenge, trust)
        judge(self._policy, worker, None).require()
        return worker, hashlib.sha256(evidence.encode()).hexdigest()


def audited(refusal: BrokerError) -> BrokerError:
    """Known to be in the audit log, where nothing else needs to remember it."""
    _LOG.warning("refused: %s", refusal)
    refusal.audited = True
    return refusal
