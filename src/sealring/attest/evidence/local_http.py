"""A question to a service of this machine's own: a cloud's metadata service, a pod's agent.

What it answers is not believed for coming from there: evidence carries its own proof.
"""

from __future__ import annotations

import http.client
from typing import Final

from sealring.errors import AttestationUnavailable

_SECONDS: Final = 10.0
_MAX_BYTES: Final = 1 << 20


def ask(address: tuple[str, int], path: str, body: bytes | None = None) -> bytes:
    """GET, or POST of JSON where there is a body. The answer, if its status is 200."""
    host, port = address
    where = f"http://{host}:{port}{path.partition('?')[0]}"
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        headers = {"Metadata": "true"} | ({"Content-Type": "application/json"} if body else {})
        connection.request("POST" if body else "GET", path, body, headers)
        answer = connection.getresponse()
        content = answer.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as problem:
        raise AttestationUnavailable(f"{where} does not answer: {problem}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK or len(content) > _MAX_BYTES:
        raise AttestationUnavailable(f"{where} answers with status {answer.status}")
    return content
