"""Turns an error on one side into the same error on the other.

A refusal over TLS has an error's code and a text. The code must be one of those in
sealring/errors.py, and the text is cut and cleaned, so a peer can only choose one of our errors.
If TLS itself fails there is only an alert or a verify code; their tables are here too.
"""

from __future__ import annotations

from typing import Any, Final

from OpenSSL.SSL import X509VerificationCodes as Code

from sealring.core.handshake.messages import Message, exactly, integer, text
from sealring.errors import (
    GroupEnded,
    GroupError,
    HandshakeError,
    MalformedSetup,
    PeerNotAdmitted,
    PeerUnreachable,
    SealringError,
    Unsupported,
    classes_by_code,
)
from sealring.limits import MAX_WORLD

_MAX_TEXT: Final = 600
_SAYS: Final = " says: "

_REFUSAL: Final = frozenset({"type", "error", "text"})
_MISDIRECTED: Final = "misdirected"
"""An optional field: present and true if the peer was reached at a wrong address."""
_ABOUT: Final = "about"
"""An optional field: the rank that the error is about, if another worker reported it."""
_ENDED: Final = _REFUSAL | {"failure", "about", "by", "collective"}

_REFUSALS: Final = frozenset(
    code
    for code, kind in classes_by_code().items()
    if issubclass(kind, HandshakeError) and code not in (HandshakeError.code, GroupEnded.code)
)
_FAILURES: Final = frozenset(
    code
    for code, kind in classes_by_code().items()
    if issubclass(kind, GroupError) and code != GroupError.code
)

_BAD_CERTIFICATE: Final = (
    "handshake.unknown_authority",
    "refused this worker's certificate: give all ranks one job secret or one SEALRING_AUTHORITY",
)
_ALERTS: Final[dict[int, tuple[str, str]]] = {
    40: ("handshake.suite_mismatch", "shares no cipher suite or key exchange with this worker"),
    42: _BAD_CERTIFICATE,
    43: _BAD_CERTIFICATE,
    44: _BAD_CERTIFICATE,
    45: (
        "handshake.certificate_expired",
        "says that this worker's certificate, or its authority, has expired",
    ),
    46: _BAD_CERTIFICATE,
    48: _BAD_CERTIFICATE,
    51: _BAD_CERTIFICATE,
    70: ("handshake.protocol_mismatch", "does not speak TLS 1.3"),
    71: ("handshake.suite_mismatch", "shares no cipher suite or key exchange with this worker"),
    116: ("handshake.unknown_authority", "got no certificate from this worker"),
    120: ("handshake.protocol_mismatch", "does not speak sealring's protocol"),
}
"""Code and text for each TLS alert that the peer sent, by its number in RFC 8446."""

_REASONS: Final[dict[str, tuple[str, str]]] = {
    "peer did not return a certificate": ("handshake.unknown_authority", "showed no certificate"),
    "unsupported protocol": ("handshake.protocol_mismatch", "does not speak TLS 1.3"),
    "no shared cipher": ("handshake.suite_mismatch", "shares no cipher suite with this worker"),
    "no suitable key share": (
        "handshake.suite_mismatch",
        "shares no key exchange with this worker",
    ),
    "no suitable groups": ("handshake.suite_mismatch", "shares no key exchange with this worker"),
}
"""Code and text for each reason that OpenSSL itself gives for refusing what the peer sent."""


def refusal_of(error: SealringError) -> Message:
    if isinstance(error, GroupEnded) and error.failure is not None:
        return _refusal_with(error.failure)
    # The peer does not learn other errors of this worker, only that this worker is gone.
    told = error.code in _REFUSALS or isinstance(error, Unsupported)
    code = error.code if told else PeerUnreachable.code
    refusal: Message = {"type": "refusal", "error": code, "text": _clean(passed_on(error))}
    if isinstance(error, HandshakeError) and error.misdirected:
        refusal[_MISDIRECTED] = True
    if isinstance(error, HandshakeError) and None not in (error.reported_by, error.peer):
        refusal[_ABOUT] = error.peer
    return refusal


def error_of(message: Message, who: str, peer: int) -> SealringError:
    """The error that a verified peer's refusal stands for.

    `proven` is true if the error is about this peer: its refusal was seen here. If the peer reports
    another rank, there is only its word for it.
    """
    if message.get("error") == GroupEnded.code:
        return _ended(message, who, peer)
    misdirected = message.get(_MISDIRECTED) is True
    beside = {_ABOUT, _MISDIRECTED} if misdirected else {_ABOUT}
    exactly(message, _REFUSAL | (message.keys() & beside))
    reported = _ABOUT in message
    about = integer(message, _ABOUT, 0, MAX_WORLD - 1) if reported else peer
    code, said = text(message, "error"), _clean(text(message, "text"))
    reason = f"{who}{_SAYS}{said}"
    if code == Unsupported.code:
        refused = Unsupported(reason)
        refused.told_by = peer
        return refused
    if code not in _REFUSALS:
        return MalformedSetup(
            f"{who} refused this worker for a reason unknown here", peer=peer, proven=True
        )
    error: HandshakeError = _known(
        code,
        reason,
        peer=about,
        proven=not reported,
        misdirected=misdirected,
        reported_by=peer if reported else None,
    )
    error.passed_on = said if _SAYS in said else reason
    return error


def passed_on(error: SealringError) -> str:
    """The text with which an error is passed on to others.

    In a large group's tree an error passes many workers. Its text names only the worker that first
    told it: the names of all workers on the way would leave no room for the reason.
    """
    return (error.passed_on if isinstance(error, HandshakeError) else "") or str(error)


def _refusal_with(failure: GroupError) -> Message:
    """A refusal that carries a group's failure, so that every other member learns it."""
    return {
        "type": "refusal",
        "error": GroupEnded.code,
        "text": _clean(str(failure) if failure.native is None else failure.native.text),
        "failure": failure.code,
        "about": _number(failure.peer),
        "by": _number(failure.reported_by),
        "collective": failure.collective or 0,
    }


def _number(rank: int | None) -> int:
    return -1 if rank is None else rank


def _ended(message: Message, who: str, peer: int) -> HandshakeError:
    exactly(message, _ENDED)
    code = text(message, "failure")
    if code not in _FAILURES:
        raise MalformedSetup(f"{who} says that its group ended for a reason unknown here")
    about, by = (integer(message, field, -1, MAX_WORLD - 1) for field in ("about", "by"))
    reason = _clean(text(message, "text"))
    failure: GroupError = _known(
        code,
        reason,
        peer=about if about >= 0 else None,
        collective=integer(message, "collective") or None,
        reported_by=by if by >= 0 else peer,
    )
    return GroupEnded(f"{who} says: {reason}", failure=failure, peer=peer, proven=True)


def from_verify_code(code: int, who: str, claimed: int | None) -> HandshakeError:
    """The error for a certificate whose chain did not verify. Its claimed rank is not proved."""
    claim = "" if claimed is None else f" (it claims to be rank {claimed})"
    if code == Code.ERR_CERT_HAS_EXPIRED:
        return PeerNotAdmitted(
            f"the authority of {who}{claim} has expired: make a new one",
            peer=claimed,
            code="handshake.certificate_expired",
        )
    if code == Code.ERR_CERT_NOT_YET_VALID:
        return PeerNotAdmitted(
            f"the authority of {who}{claim} is not valid yet: set this machine's clock",
            peer=claimed,
            code="handshake.certificate_not_yet_valid",
        )
    return PeerNotAdmitted(
        f"{who}{claim} has a certificate that this job's authority did not sign (verify code "
        f"{code}): give all ranks one job secret or one SEALRING_AUTHORITY",
        peer=claimed,
        code="handshake.unknown_authority",
    )


def from_alert(number: int, who: str) -> HandshakeError:
    unknown = (MalformedSetup.code, f"ended TLS with alert {number}")
    code, reason = _ALERTS.get(number, unknown)
    error: HandshakeError = _known(code, f"{who} {reason}")
    return error


def from_reason(reason: str, who: str) -> HandshakeError:
    unknown = (MalformedSetup.code, f"did not speak TLS 1.3 properly: {reason}")
    code, said = _REASONS.get(reason, unknown)
    error: HandshakeError = _known(code, f"{who} {said}")
    return error


def _known(code: str, text: str, **facts: Any) -> Any:
    """Makes the error of a code from the tables above."""
    kind: Any = classes_by_code()[code]
    return kind(text, code=code, **facts)


def _clean(reason: str) -> str:
    """Makes one line of bounded length that is safe to show on a terminal."""
    reason = "; ".join(reason.splitlines())
    cut = reason if len(reason) <= _MAX_TEXT else reason[: _MAX_TEXT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
