"""An error of the broker's on its way to a client: a status, what went wrong, and clean text.

{"type": "https://github.com/...", "detail": "...", "error": "evidence.not_bound"}

The type is one of the KBS protocol's, for stock clients; `error` is the code of the error that
workers raise.
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
"""Which status and which of the KBS protocol's types an error's code goes out with."""
_REFUSALS: Final = frozenset(
    code
    for code, kind in errors.classes_by_code().items()
    if issubclass(kind, BrokerError | AttestationError)
)


def response_of(error: SealringError, path: str = "") -> Response:
    """`path` is what was asked for: the KBS protocol has no status 400."""
    if isinstance(error, errors.PolicyRefusal):
        status, kind = 403, "PolicyDeny"
    elif isinstance(error, AttestationError):
        status, kind = 401, "AttestationError"
    elif error.code in _ANSWERS:
        status, kind = _ANSWERS[error.code]
    else:
        # What went wrong in the broker itself is for its own log.
        error = BrokerError("the broker failed: see its log")
        status, kind = 500, _OTHER_TYPE
    if status == 400 and path.startswith(_KBS):
        status = 401
    content = {"type": _TYPE + kind, "detail": _clean(str(error)), "error": error.code}
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(status, json.dumps(content).encode(), headers=headers)


def error_of(response: Response, where: str) -> SealringError:
    """The error that a broker's answer stands for. It chooses among ours, and no more."""
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
    """`did`: what a broker did that is not of its protocol."""
    return BrokerError(f"the broker at {where} {did}", code="broker.malformed_answer")


def _clean(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
