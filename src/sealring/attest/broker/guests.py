"""Attested guests that are no rank of a job: what stock KBS clients may have, decided on a view.

guest/<SHA-256 of the session>    the guest's key, its machine's names, and how much it was given

A session begins when evidence passes the policy, and ends TOKEN_SECONDS later. Strangers have no
row. A guest has one for each time it attests, and can be given and refused only so much in each:
every gift is in the audit log, which only grows.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from sealring.attest.broker import nonces
from sealring.attest.broker.data_keys import DataKeys
from sealring.attest.broker.envelopes import seal
from sealring.attest.broker.keys import BrokerKeys
from sealring.attest.broker.ledger import (
    REFUSALS_LOGGED,
    Ledger,
    learn_names,
    use_nonce,
    why_machine_barred,
)
from sealring.attest.broker.messages import GuestAttestation, kind_of
from sealring.attest.broker.store import Row, Store, View
from sealring.attest.broker.strangers import Strangers
from sealring.attest.broker.tokens import TOKEN_SECONDS, make_guest_token
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
    ExpiredToken,
    ResourceNotGranted,
    UnknownToken,
    UntrustedChain,
    named,
)

GIFTS: Final = 64
"""Of one session. Then the client attests again, as it does for any answer of status 401."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A stock KBS client whose evidence passed the policy."""

    session: str
    jwk: dict[str, str]
    key: str
    """SHA-256 of the JWK, as the evidence is bound to it."""
    machines: tuple[str, ...]
    kind: str
    label: str
    evidence: str


def digest_of(session: str) -> str:
    """The session itself opens the guest's account, so the store holds its hash alone."""
    return hashlib.sha256(session.encode()).hexdigest()


def admit(
    ledger: Ledger, view: View, nonce: str, made: int, now: float, guest: Guest
) -> BrokerError | None:
    """Open the guest's session, or say why not."""
    use_nonce(view, nonce, made)
    learn_names(view, guest.machines)
    who = {"guest": guest.session[:16], "key": guest.key, "kind": guest.label}
    if (refusal := why_machine_barred(view, guest.machines)) is not None:
        error = named(refusal)
        ledger.note(view, now, "refused", **who, error=error, why=str(refusal))
        return refusal
    view.put(
        _place(guest.session),
        {
            "until": int(now) + TOKEN_SECONDS,
            "jwk": guest.jwk,
            "key": guest.key,
            "machines": list(guest.machines),
            "kind": guest.kind,
            "label": guest.label,
            "given": 0,
            "refusals": 0,
        },
    )
    facts = {"machine": " ".join(guest.machines), "evidence": guest.evidence}
    ledger.note(view, now, "attested", **who, **facts)
    return None


def find(view: View, session: str, now: float) -> Row:
    """The row of a session that is open. `session` is its hash."""
    row = view.get(_place(session))
    if row is None:
        raise UnknownToken("this session has attested nothing: attest first")
    if now >= row["until"]:
        raise ExpiredToken("the session has ended: attest again")
    if row["given"] >= GIFTS:
        raise ExpiredToken(f"the session was given {GIFTS} things: attest again")
    return row


def give(
    ledger: Ledger, view: View, session: str, path: str, now: float, objection: BrokerError | None
) -> BrokerError | None:
    """Note a gift to a session that is open, or why it gets nothing."""
    row = find(view, session, now)
    who = {"guest": session[:16], "key": row["key"], "kind": row["label"], "what": path}
    refusal = why_machine_barred(view, row["machines"]) or objection
    if refusal is None:
        view.put(_place(session), {**row, "given": row["given"] + 1})
        ledger.note(view, now, "gave", **who)
        return None
    if row["refusals"] < REFUSALS_LOGGED:
        view.put(_place(session), {**row, "refusals": row["refusals"] + 1})
        error = named(refusal)
        ledger.note(view, now, "refused", **who, error=error, why=str(refusal))
    return refusal


def _place(session: str) -> str:
    return f"guest/{session}"


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
            session=digest_of(session),
            jwk=sent.jwk,
            key=hashlib.sha256(sent.challenge.public_key).hexdigest(),
            machines=(worker.machine, *worker.also_known_as) if worker.machine else (),
            kind=kind,
            label=worker.label,
            evidence=digest,
        )
        refusal = await self._store.transact(
            lambda view: admit(self._ledger, view, nonce.hex(), made, now, guest)
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
        row = await self._store.transact(lambda view: find(view, session, now))
        content = self._data_keys.read(path)
        objection: BrokerError | None = None
        if path not in granted_to_guests(self._policy, row["kind"]):
            objection = ResourceNotGranted(f"the policy does not grant {path} to this guest")
        elif isinstance(content, BrokerError):
            objection = content
        refusal = await self._store.transact(
            lambda view: give(self._ledger, view, session, path, now, objection)
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
