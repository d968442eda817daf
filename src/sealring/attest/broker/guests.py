"""Attested guests that are no rank of a job: what stock KBS clients may have, decided on a view.

guest/<SHA-256 of the session>    the guest's key, its machine's names, and how much it was given

A session begins when evidence passes the policy, and ends TOKEN_SECONDS later. Strangers have no
row. A guest has one for each time it attests, and can be given and refused only so much in each:
every gift is in the audit log, which only grows.
"""

from __future__ import annotations

import hashlib
from typing import Final

from sealring.attest.broker.ledger import (
    REFUSALS_LOGGED,
    Ledger,
    learn_names,
    use_nonce,
    why_machine_barred,
)
from sealring.attest.broker.store import Row, View
from sealring.attest.broker.tokens import TOKEN_SECONDS
from sealring.errors import BrokerError, TokenRefused

GIFTS: Final = 64
"""Of one session. Then the client attests again, as it does for any answer of status 401."""


def digest_of(session: str) -> str:
    """The session itself opens the guest's account, so the store holds its hash alone."""
    return hashlib.sha256(session.encode()).hexdigest()


def admit(
    ledger: Ledger, view: View, nonce: str, made: int, now: float, guest: Row, evidence: str
) -> BrokerError | None:
    """Open the guest's session, or say why not. `guest`: its session, jwk, key, machines, kind."""
    use_nonce(view, nonce, made)
    learn_names(view, guest["machines"])
    who = {"guest": guest["session"][:16], "key": guest["key"], "kind": guest["label"]}
    if (refusal := why_machine_barred(view, guest["machines"])) is not None:
        ledger.note_refusal(view, now, refusal, who)
        return refusal
    row = {name: value for name, value in guest.items() if name != "session"}
    until = int(now) + TOKEN_SECONDS
    view.put(_place(guest["session"]), {**row, "until": until, "given": 0, "refusals": 0})
    machine = " ".join(guest["machines"])
    ledger.note(view, now, "attested", **who, machine=machine, evidence=evidence)
    return None


def find(view: View, session: str, now: float) -> Row:
    """The row of a session that is open. `session` is its hash."""
    row = view.get(_place(session))
    if row is None:
        raise TokenRefused(
            "this session has attested nothing: attest first", code="broker.unknown_token"
        )
    if now >= row["until"]:
        raise TokenRefused("the session has ended: attest again", code="broker.expired_token")
    if row["given"] >= GIFTS:
        raise TokenRefused(
            f"the session was given {GIFTS} things: attest again", code="broker.expired_token"
        )
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
        ledger.note_refusal(view, now, refusal, who)
    return refusal


def _place(session: str) -> str:
    return f"guest/{session}"
