"""TLS 1.3 over asyncio, by the OpenSSL that also serves the links between workers.

Python's own ssl module uses the system's OpenSSL, which on many systems has no X25519MLKEM768. Data
keys pass here, and must stay safe from a later quantum computer too. A worker insists on that key
exchange. A broker also answers clients without it, because what it gives out is encrypted to the
worker's key anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

import h11
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from OpenSSL import SSL, crypto

from sealring.attest.broker.messages import malformed
from sealring.core.no_fork import NoFork
from sealring.errors import BrokerError, BrokerUnavailable
from sealring.formats.http import Response
from sealring.limits import KEY_EXCHANGE

MAX_ANSWER_BYTES: Final = 1 << 20


class Client:
    """Sends requests over one connection, one after the other."""

    def __init__(
        self, stream: TlsStream, host: str, answered: Callable[[], None] = lambda: None
    ) -> None:
        """`answered` is called after each answer."""
        self.stream = stream
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
            await self.stream.write(data)
            response = await self.receive()
            self._answered()
            return response
        except h11.ProtocolError as problem:
            raise malformed(self._host, f"does not speak HTTP/1.1: {problem}") from None
        except (OSError, SSL.Error):
            raise BrokerUnavailable(
                f"the broker at {self._host} closed the connection", code="broker.unreachable"
            ) from None

    async def receive(self) -> Response:
        """The next answer."""
        head: h11.Response | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                data = await self.stream.read()
                if not data:
                    raise BrokerUnavailable(
                        f"the broker at {self._host} closed the connection",
                        code="broker.unreachable",
                    )
                self._http.receive_data(data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_ANSWER_BYTES:
                    raise malformed(self._host, "answers without an end")
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
                raise malformed(self._host, "does not speak HTTP/1.1")

    def close(self) -> None:
        self.stream.close()

    def abort(self) -> None:
        """Drops what was not sent yet: a broker that does not read would never take it."""
        self.stream.abort()


T = TypeVar("T")
_CHUNK: Final = 64 << 10
_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


class TlsStream:
    """Bytes in and out of one connection. The caller sets the time limits."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: SSL.Connection,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._tls = connection

    async def handshake(self) -> None:
        await self._run(self._tls.do_handshake)
        await self._flush()

    async def read(self) -> bytes:
        """Some bytes. Empty at the end."""
        try:
            return await self._run(lambda: self._tls.recv(_CHUNK))
        except (SSL.ZeroReturnError, ConnectionError):
            return b""

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK):
            chunk = data[at : at + _CHUNK]
            while chunk:
                with NoFork():
                    sent = self._tls.send(chunk)
                chunk = chunk[sent:]
            await self._flush()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._tls.shutdown()
            self._writer.write(self._tls.bio_read(_CHUNK))
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    @property
    def address(self) -> str | None:
        """The peer's IP address."""
        return (self._writer.get_extra_info("peername") or (None,))[0]

    @property
    def certificate(self) -> x509.Certificate | None:
        return self._tls.get_peer_certificate(as_cryptography=True)

    @property
    def key_exchange(self) -> str | None:
        return self._tls.get_group_name()

    async def _run(self, call: Callable[[], T]) -> T:
        while True:
            try:
                with NoFork():
                    return call()
            except SSL.WantReadError:
                await self._flush()
                data = await self._reader.read(_CHUNK)
                if not data:
                    raise ConnectionResetError("the connection was closed") from None
                self._tls.bio_write(data)
            except SSL.Error:
                await self._flush()  # sends the alert that says why
                raise

    async def _flush(self) -> None:
        with contextlib.suppress(SSL.WantReadError):
            while True:
                self._writer.write(self._tls.bio_read(_CHUNK))
        await self._writer.drain()


@NoFork()
def server_context(certificate: x509.Certificate, key: Ed25519PrivateKey) -> SSL.Context:
    context = _context()
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    return context


@NoFork()
def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: SSL.Context
) -> TlsStream:
    connection = SSL.Connection(context, None)
    connection.set_accept_state()
    return TlsStream(reader, writer, connection)


@NoFork()
def client_context(authorities: Sequence[x509.Certificate]) -> SSL.Context:
    context = _context()
    store = context.get_cert_store()
    assert store is not None
    for authority in authorities:
        store.add_cert(crypto.X509.from_cryptography(authority))
    store.set_flags(crypto.X509StoreFlags.X509_STRICT | crypto.X509StoreFlags.PARTIAL_CHAIN)
    context.set_verify(SSL.VERIFY_PEER, _remember_why)
    return context


def _remember_why(
    connection: SSL.Connection, certificate: crypto.X509, code: int, depth: int, good: int
) -> bool:
    """Keeps OpenSSL's verdict. On failure the code and the certificate are kept for the error."""
    if not good:
        connection.set_app_data((code, certificate.to_cryptography()))
    return bool(good)


async def connect(
    host: str, port: int, context: SSL.Context, address: str | None = None
) -> TlsStream:
    """Connects to a broker at `address`, and checks that it has a certificate for `host`."""
    where = f"{host}:{port}"
    try:
        reader, writer = await asyncio.open_connection(address or host, port)
    except (OSError, socket.gaierror) as problem:
        raise BrokerUnavailable(
            f"the broker at {where} cannot be reached ({problem}): check that host and port are "
            "the broker's, and that it runs",
            code="broker.unreachable",
        ) from None
    try:
        with NoFork():
            connection = SSL.Connection(context, None)
            connection.set_connect_state()
            if not _is_address(host):
                connection.set_tlsext_host_name(host.encode("idna"))
        stream = TlsStream(reader, writer, connection)
        try:
            await stream.handshake()
        except (ConnectionError, OSError):
            raise BrokerUnavailable(
                f"the broker at {where} closed the connection", code="broker.unreachable"
            ) from None
        except SSL.Error as problem:
            raise _untrusted(_why_untrusted(connection, where, problem)) from None
        _check_name(stream.certificate, host, where)
        if stream.key_exchange != KEY_EXCHANGE:
            raise _untrusted(
                f"the broker at {where} agreed on the key exchange {stream.key_exchange}, and only "
                f"{KEY_EXCHANGE} is accepted"
            )
    except BaseException:
        writer.transport.abort()
        raise
    return stream


def _why_untrusted(connection: SSL.Connection, where: str, problem: SSL.Error) -> str:
    code, certificate = connection.get_app_data() or (0, None)
    if certificate is not None and code in (_NOT_YET_VALID, _EXPIRED):
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return (
            f"by this machine's clock it is {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, and the "
            f"certificate of what answers at {where} is valid from {start:%Y-%m-%d %H:%M} to "
            f"{end:%Y-%m-%d %H:%M}: set the clock of this machine, or the broker's, right"
        )
    return (
        f"what answers at {where} cannot prove to be the broker ({problem}): check "
        "SEALRING_AUTHORITY and the address"
    )


def _untrusted(problem: str) -> BrokerError:
    return BrokerError(problem, code="broker.untrusted_broker")


def _check_name(certificate: x509.Certificate | None, host: str, where: str) -> None:
    """Requires that one of the certificate's names is exactly the host's. No wildcards."""
    try:
        if certificate is None:
            raise ValueError
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        names = x509.SubjectAlternativeName([])
    if _is_address(host):
        known = ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    else:
        known = host.lower() in names.get_values_for_type(x509.DNSName)
    if not known:
        raise _untrusted(
            f"the certificate of what answers at {where} is not for {host}: start the broker with "
            f"--name {host}"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _context() -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION)
    return context
