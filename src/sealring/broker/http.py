"""HTTP/1.1 over a TlsStream, both ends, with a limit on everything that the other side chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import h11
from OpenSSL import SSL

from sealring.broker.bodies import Bodies, Body
from sealring.broker.tls import TlsStream
from sealring.errors import (
    BrokerUnreachable,
    MalformedAnswer,
    MalformedRequest,
    RequestTooLarge,
    RequestTooSlow,
    SealringError,
)
from sealring.identity.attestation.evidence import MAX_EVIDENCE_BYTES

MAX_ANSWER_BYTES: Final = 1 << 20
_CHUNK: Final = 64 << 10


class Stream(Protocol):
    async def handshake(self) -> None: ...
    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class PlainStream:
    """Without TLS, for the page, which never leaves this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def handshake(self) -> None:
        pass

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 4096
    connections_per_address: int = 2048
    head_bytes: int = 16 << 10
    body_bytes: int = MAX_EVIDENCE_BYTES + (64 << 10)
    all_body_bytes: int = 32 << 20
    """Of all requests together that are not answered yet (bodies.py)."""
    request_seconds: float = 15.0
    """For TLS's handshake, and again for each request, from its first byte to its last."""
    idle_seconds: float = 30.0
    answer_seconds: float = 30.0
    """For an answer to be taken."""
    requests_per_second: float = 200.0
    burst: int = 4000


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Handle = Callable[[Request], Awaitable[Response]]
Explain = Callable[[SealringError, str, str], Response]
"""The answer to a request of this address, for this path, that was refused."""


async def serve_connection(
    stream: Stream,
    address: str,
    limits: Limits,
    bodies: Bodies,
    handle: Handle,
    explain: Explain,
) -> None:
    """Answer requests until the client goes, is too slow, or makes a mistake."""
    async with asyncio.timeout(limits.request_seconds):
        await stream.handshake()
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
    while True:
        if not http.trailing_data[0]:  # nothing of the next request came with the last one
            async with asyncio.timeout(limits.idle_seconds):
                first = await stream.read()
            if not first:
                return
            http.receive_data(first)
        body = bodies.open(address, stream.abort)
        path = ""
        try:
            async with asyncio.timeout(limits.request_seconds):
                request = await _receive_request(stream, http, body, limits)
            path = request.path
            response = await handle(request)
        except TimeoutError:
            late = RequestTooSlow("the request did not come whole in time")
            response = explain(late, address, path)
        except h11.RemoteProtocolError as problem:
            error = MalformedRequest(f"that is not HTTP/1.1: {problem}")
            response = explain(error, address, path)
        except SealringError as refusal:
            response = explain(refusal, address, path)
        finally:
            body.close()
        async with asyncio.timeout(limits.answer_seconds):
            await _send_response(stream, http, response)
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return
        http.start_next_cycle()


async def _receive_request(
    stream: Stream, http: h11.Connection, body: Body, limits: Limits
) -> Request:
    head: h11.Request | None = None
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await stream.read()
            if not data:
                raise MalformedRequest("the request ends before its end")
            http.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body.add(event.data)
            if len(body.content) > limits.body_bytes:
                raise RequestTooLarge(f"a request has at most {limits.body_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
            }
            return Request(
                head.method.decode("latin-1"),
                head.target.decode("latin-1"),
                headers,
                body.finish(),
                body.address,
            )
        else:
            raise MalformedRequest("the connection ends here")


async def _send_response(stream: Stream, http: h11.Connection, response: Response) -> None:
    headers = {
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **response.headers,
    }
    if http.their_state is not h11.DONE:
        headers["connection"] = "close"
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    event = h11.Response(status_code=response.status, headers=list(headers.items()))
    data = http.send(event) or b""
    data += http.send(h11.Data(data=response.body)) or b""
    data += http.send(h11.EndOfMessage()) or b""
    await stream.write(data)


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
            raise MalformedAnswer(
                f"the broker at {self._host} does not speak HTTP/1.1: {problem}"
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
                    raise MalformedAnswer(f"the broker at {self._host} answers without an end")
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
                raise MalformedAnswer(f"the broker at {self._host} does not speak HTTP/1.1")

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        """Drops what was not sent yet, which a broker that does not read would never take."""
        self._stream.abort()
