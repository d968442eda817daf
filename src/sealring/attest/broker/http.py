"""Requests to a broker: HTTP/1.1 over a TlsStream, with a limit on what the broker answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import h11
from OpenSSL import SSL

from sealring.attest.broker.tls import TlsStream
from sealring.errors import BrokerError, BrokerUnreachable
from sealring.formats.http import Response

MAX_ANSWER_BYTES: Final = 1 << 20


class Client:
    """Requests over one connection, one after the other."""

    def __init__(
        self, stream: TlsStream, host: str, answered: Callable[[], None] = lambda: None
    ) -> None:
        """`answered` is called after each answer."""
        self._stream = stream
        self._host = host
        self._answered = answered
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=16 << 10)

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        fields = {
            "host": self._host,
            "content-length": str(len(body)),
            "content-type": "application/json",
            **(headers or {}),
        }
        event = h11.Request(method=method, target=path, headers=list(fields.items()))
        data = self._http.send(event) or b""
        data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        try:
            await self._stream.write(data)
            response = await self._receive()
            self._answered()
            return response
        except h11.ProtocolError as problem:
            raise BrokerError(
                f"the broker at {self._host} does not speak HTTP/1.1: {problem}",
                code="broker.malformed_answer",
            ) from None
        except (OSError, SSL.Error):
            raise BrokerUnreachable(f"the broker at {self._host} closed the connection") from None

    async def _receive(self) -> Response:
        head: h11.Response | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                data = await self._stream.read()
                if not data:
                    raise BrokerUnreachable(f"the broker at {self._host} closed the connection")
                self._http.receive_data(data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_ANSWER_BYTES:
                    raise BrokerError(
                        f"the broker at {self._host} answers without an end",
                        code="broker.malformed_answer",
                    )
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {
                    name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
                }
                if self._http.their_state is h11.DONE:
                    self._http.start_next_cycle()
                return Response(
                    head.status_code, bytes(body), headers.get("content-type", ""), headers
                )
            else:
                raise BrokerError(
                    f"the broker at {self._host} does not speak HTTP/1.1",
                    code="broker.malformed_answer",
                )

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        """Drops what was not sent yet, which a broker that does not read would never take."""
        self._stream.abort()
