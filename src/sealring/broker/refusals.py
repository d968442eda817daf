"""An error of the broker's on its way to the worker: a status, a class of ours and clean text."""

from __future__ import annotations

import json
from typing import Any, Final

from sealring import errors
from sealring.broker.http import Response
from sealring.errors import AttestationError, BrokerError, MalformedAnswer, SealringError

_KIND: Final = "urn:sealring:error:"
_MAX_TEXT: Final = 600
_STATUS: Final[dict[type[SealringError], int]] = {
    errors.MalformedRequest: 400,
    errors.UnknownNonce: 401,
    errors.ExpiredNonce: 401,
    errors.ReusedNonce: 401,
    errors.UnknownToken: 401,
    errors.ExpiredToken: 401,
    errors.ReusedToken: 401,
    errors.RankTaken: 403,
    errors.WorkerRevoked: 403,
    errors.ResourceNotGranted: 403,
    errors.NoSuchResource: 404,
    errors.RequestTooSlow: 408,
    errors.RequestTooLarge: 413,
    errors.TooManyRequests: 429,
    errors.StoreUnavailable: 503,
    errors.BrokerMisconfigured: 500,
}
_UNAUTHORISED, _FORBIDDEN, _OURS = 401, 403, 500

_BY_NAME: Final[dict[str, type[SealringError]]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BrokerError | AttestationError)
}


def response_of(error: SealringError) -> Response:
    status = _STATUS.get(type(error))
    if status is None and isinstance(error, AttestationError):
        status = _FORBIDDEN if isinstance(error, errors.PolicyRefusal) else _UNAUTHORISED
    name = type(error).__name__ if status is not None else "BrokerError"
    # What went wrong in the broker itself is for its own log.
    detail = _clean(str(error)) if status is not None else "the broker failed: see its log"
    body = json.dumps({"type": _KIND + name, "detail": detail}).encode()
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(status or _OURS, body, headers=headers)


def error_of(response: Response, where: str) -> SealringError:
    """The error that a broker's answer stands for. It chooses among ours, and no more."""
    try:
        value: Any = json.loads(response.body)
        name, detail = value["type"], value["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        name = detail = None
    if not isinstance(name, str) or not isinstance(detail, str):
        return MalformedAnswer(f"the broker at {where} answered {response.status} and no reason")
    kind = _BY_NAME.get(name.removeprefix(_KIND), BrokerError)
    return kind(f"the broker at {where} says: {_clean(detail)}")


def _clean(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
