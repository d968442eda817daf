"""An error of the broker's on its way to a client: a status, what went wrong, and clean text.

{"type": "https://github.com/confidential-containers/kbs/errors/...", "detail", "error": "NotBound"}

The type is one of the KBS protocol's, for stock clients; `error` is the class that workers raise.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sealring import errors
from sealring.errors import AttestationError, BrokerError, SealringError
from sealring.formats.http import Response
from sealring.formats.strict import read_json

_TYPE: Final = "https://github.com/confidential-containers/kbs/errors/"
_KBS: Final = "/kbs/v0/"
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
    errors.RecordedOtherwise: 409,
    errors.TooManyRecords: 403,
    errors.RequestTooSlow: 408,
    errors.RequestTooLarge: 413,
    errors.TooManyRequests: 429,
    errors.StoreUnavailable: 503,
    errors.BrokerMisconfigured: 500,
}
_UNAUTHORISED, _FORBIDDEN, _OURS = 401, 403, 500
_TYPES: Final[dict[type[SealringError], str]] = {
    errors.MalformedRequest: "SerdeError",
    errors.UnknownNonce: "AttestationError",
    errors.ExpiredNonce: "AttestationError",
    errors.ReusedNonce: "AttestationError",
    errors.UnknownToken: "TokenNotFound",
    errors.ExpiredToken: "TokenVerifierError",
    errors.ReusedToken: "TokenVerifierError",
    errors.RankTaken: "PolicyDeny",
    errors.WorkerRevoked: "PolicyDeny",
    errors.ResourceNotGranted: "PolicyDeny",
    errors.NoSuchResource: "InvalidRequestPath",
}
_OTHER_TYPE: Final = "PluginInternalError"

_BY_NAME: Final[dict[str, type[SealringError]]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BrokerError | AttestationError)
}


def response_of(error: SealringError, path: str = "") -> Response:
    """`path` is what was asked for: the KBS protocol has no status 400."""
    status = _STATUS.get(type(error))
    if status is None and isinstance(error, AttestationError):
        status = _FORBIDDEN if isinstance(error, errors.PolicyRefusal) else _UNAUTHORISED
    if isinstance(error, errors.MalformedRequest) and path.startswith(_KBS):
        status = _UNAUTHORISED
    name = type(error).__name__ if status is not None else "BrokerError"
    # What went wrong in the broker itself is for its own log.
    detail = _clean(str(error)) if status is not None else "the broker failed: see its log"
    body = json.dumps({"type": _TYPE + _type_of(error), "detail": detail, "error": name}).encode()
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(status or _OURS, body, headers=headers)


def _type_of(error: SealringError) -> str:
    if isinstance(error, AttestationError):
        return "PolicyDeny" if isinstance(error, errors.PolicyRefusal) else "AttestationError"
    return _TYPES.get(type(error), _OTHER_TYPE)


def error_of(response: Response, where: str) -> SealringError:
    """The error that a broker's answer stands for. It chooses among ours, and no more."""
    try:
        value: Any = read_json(response.body)
        name, detail = value["error"], value["detail"]
    except (ValueError, KeyError, TypeError):
        name = detail = None
    if not isinstance(name, str) or not isinstance(detail, str):
        return BrokerError(
            f"the broker at {where} answered {response.status} and no reason",
            code="broker.malformed_answer",
        )
    kind = _BY_NAME.get(name, BrokerError)
    return kind(f"the broker at {where} says: {_clean(detail)}")


def _clean(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
