"""Nonces that need no memory until they are used.

     0        8         16            32
     | made   | random  | tag         |

The tag is a MAC over both and the session, so giving one out writes nothing: a client that asks a
million times fills no disk, and a restarted broker or another replica knows its own. A nonce
becomes a row in the store when evidence that passes the policy comes for it, and then never passes
again. One that failing evidence came for is remembered by this broker alone (strangers.py).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final

from sealring.attest.broker.clock import SKEW_SECONDS
from sealring.attest.evidence.evidence import NONCE_BYTES
from sealring.errors import ExpiredNonce, UnknownNonce
from sealring.limits import MAX_NONCE_SECONDS

_TAG_AT: Final = 16
KEPT_SECONDS: Final = MAX_NONCE_SECONDS + 2 * SKEW_SECONDS
"""How long a used nonce is remembered: longer than any policy lets it be good, so that another
`nonce_seconds` brings none back."""


def new_session(tee: str) -> str:
    """Holds what the client says its TEE is: nonces are good for that session and TEE alone."""
    return f"{os.urandom(16).hex()}.{tee}"


def tee_in(session: str) -> str:
    """To be believed of a session for which `check_nonce` has found a nonce to be ours."""
    return session.partition(".")[2]


def make_nonce(key: bytes, session: str, now: float) -> bytes:
    body = int(now * 1000).to_bytes(8, "big") + os.urandom(8)
    return body + _tag(key, session, body)


def check_nonce(key: bytes, session: str, nonce: bytes, now: float, seconds: int) -> int:
    """That we made it, for this session, not long ago; returns when we did."""
    body, tag = nonce[:_TAG_AT], nonce[_TAG_AT:]
    if len(nonce) != NONCE_BYTES or not hmac.compare_digest(tag, _tag(key, session, body)):
        raise UnknownNonce("this broker gave out no such nonce in this session: ask for one")
    made = int.from_bytes(body[:8], "big") / 1000
    if made - now > SKEW_SECONDS:
        raise ExpiredNonce(
            f"the nonce was made {made - now:.0f} s from now: the brokers' clocks differ, set them"
        )
    if now - made > seconds:
        raise ExpiredNonce(f"the nonce is older than {seconds} s: ask for another one")
    return int(made)


def _tag(key: bytes, session: str, body: bytes) -> bytes:
    return hmac.new(key, session.encode() + b"\0" + body, hashlib.sha256).digest()[:_TAG_AT]
