"""One TLS 1.3 connection on a connected socket, with a deadline.

The socket is handed on to the native records when TLS is done with it, so TLS must not read a byte
past its own records. OpenSSL reads a record's header and then just its body as long as read-ahead
is off, which is its default; test_raw_bytes_after_detach holds it to that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import weakref
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

from cryptography import x509
from OpenSSL import SSL, crypto
from OpenSSL._util import ffi, lib

from sealring import _native
from sealring.core.handshake.connection import Connection
from sealring.core.handshake.refusals import from_alert, from_reason, from_verify_code
from sealring.core.identity.certificates import claims_of
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.kept_key import Erased, KeptKey
from sealring.core.no_fork import NoFork, OwnLock
from sealring.errors import (
    ConfigurationError,
    MalformedSetup,
    PeerIncompatible,
    PeerUnreachable,
    SealringError,
)
from sealring.limits import KEY_EXCHANGE, MAX_SETUP_BYTES


class LoadedKey:
    """OpenSSL has the key as long as this object, or a connection that was given it."""

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, key: KeptKey) -> None:
        """pyOpenSSL's own function for it leaves copies of the key in memory."""
        loaded: Any = ffi.NULL
        encoded = key.enlarged()
        overwritten = _native.FreedMemoryOverwritten()
        with ffi.from_buffer(encoded) as memory:
            source = ffi.gc(lib.BIO_new_mem_buf(memory, len(encoded)), lib.BIO_free)
            if source != ffi.NULL:
                loaded = lib.d2i_PrivateKey_bio(source, ffi.NULL)
                ffi.release(source)
        del overwritten
        if loaded == ffi.NULL:
            lib.ERR_clear_error()
            raise MemoryError("OpenSSL has no memory for a private key")
        # Not in a __del__: that runs while another thread can still find this object.
        self.pointer: Any = ffi.gc(loaded, _free)


def _free(pointer: Any) -> None:
    overwritten = _native.FreedMemoryOverwritten()
    with NoFork():
        lib.EVP_PKEY_free(pointer)
    del overwritten


_lock: Final = OwnLock()
_loaded: Final[weakref.WeakValueDictionary[KeptKey, LoadedKey]] = weakref.WeakValueDictionary()
# A child has none of its parent's keys, and must not find one here.
os.register_at_fork(after_in_child=_loaded.clear)


def loaded(key: KeptKey) -> LoadedKey:
    """For a handshake. Who keeps it keeps the key in memory that nothing protects."""
    with _lock:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = LoadedKey(key)
        return found


ALPN: Final = b"sealring"
_CIPHERSUITES: Final = b"TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
_DATES: Final = (
    SSL.X509VerificationCodes.ERR_CERT_HAS_EXPIRED,
    SSL.X509VerificationCodes.ERR_CERT_NOT_YET_VALID,
)
_NO_AUTO_CHAIN: Final = 0x8  # SSL_MODE_NO_AUTO_CHAIN, which pyOpenSSL does not name
_CLEANSE_PLAINTEXT: Final = 0x2  # SSL_OP_CLEANSE_PLAINTEXT: what was read is overwritten
_MOST_LATE: Final = 16
"""An acceptor's OpenSSL sends two tickets, of which no use is made. More is no set-up."""
_RECORD_BYTES: Final = 16 << 10
"""What a TLS record holds at most."""
_MOST_CONTEXTS: Final = 64
"""A worker has two, and as many again when its authority is replaced."""

T = TypeVar("T")


class TlsConnection(Connection):
    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        *,
        dialer: bool,
        who: str,
        deadline: float,
    ) -> None:
        super().__init__(sock, who, deadline)
        self._own_fingerprint = credentials.fingerprint
        self._alert: int | None = None
        self._verify_code: int | None = None
        self._claimed_rank: int | None = None
        self._late = 0
        """Turns of TLS's own state after its handshake: two for each ticket or new key."""
        self._ahead = bytearray()
        """What a record held beyond the bytes that were taken."""
        self._key: LoadedKey | None = None
        """Until it has signed."""
        self._tls = self._new_tls(credentials, dialer=dialer)

    @NoFork()
    def _new_tls(self, credentials: Credentials, *, dialer: bool) -> SSL.Connection:
        tls = _Allocated(context_for(credentials.authorities, dialer=dialer), self._socket)
        self._key = loaded(credentials.key)
        identify(tls, credentials, self._key)
        tls.set_app_data(self)
        tls.set_info_callback(self._on_info)
        # With this mode, which pyOpenSSL sets, one call reads on for as long as the peer sends
        # messages of TLS itself, and no deadline counts.
        lib.SSL_clear_mode(tls._ssl, lib.SSL_MODE_AUTO_RETRY)
        if dialer:
            tls.set_connect_state()
        else:
            tls.set_accept_state()
        return tls

    def handshake(self) -> x509.Certificate:
        """Run TLS's handshake; returns the certificate whose key the peer has used.

        Its chain is checked, its dates are not: see `on_certificate`.
        """
        self._run(self._tls.do_handshake)
        return self._established()

    def advance(self) -> x509.Certificate | None:
        """The same without waiting; None while bytes of the peer are missing."""
        with _Call(self):
            try:
                self._tls.do_handshake()
            except (SSL.WantReadError, SSL.WantWriteError):
                return None
        return self._established()

    def _established(self) -> x509.Certificate:
        self.established = True
        with NoFork():
            self._give_up_private_key()
            certificate = self._tls.get_peer_certificate(as_cryptography=True)
        if certificate is None:  # VERIFY_FAIL_IF_NO_PEER_CERT makes this impossible
            raise MalformedSetup(f"{self.who} showed no certificate")
        return certificate

    def _give_up_private_key(self) -> None:
        """It has signed; a connection may live as long as a group takes to form.

        With another context a connection takes that one's certificate and key, and here it has
        none. What the handshake agreed on stays, and so does what the connection itself was set to.
        """
        keyless = _without_key()._context
        overwritten = _native.FreedMemoryOverwritten()
        changed = lib.SSL_set_SSL_CTX(self._tls._ssl, keyless)
        self._key = None
        del overwritten
        if changed == ffi.NULL:
            _forget_errors()
            raise MalformedSetup(f"{self.who}: TLS does not give up the private key")

    @property
    def own_fingerprint(self) -> bytes:
        return self._own_fingerprint

    def check_negotiated(self) -> None:
        """Refuse what TLS would have agreed to and we do not."""
        group = self._tls.get_group_name()
        if group != KEY_EXCHANGE:
            raise PeerIncompatible(
                f"{self.who} agreed on the key exchange {group}, and only {KEY_EXCHANGE} is "
                "accepted: its OpenSSL is too old, install the same sealring and pyOpenSSL there",
                code="handshake.suite_mismatch",
            )
        if self._tls.get_alpn_proto_negotiated() != ALPN:
            raise PeerIncompatible(
                f"{self.who} speaks TLS but not sealring's protocol",
                code="handshake.protocol_mismatch",
            )

    # pyOpenSSL's own functions for these return `bytes`, which cannot be overwritten.

    def export(self, label: bytes, length: int, context: bytes) -> _native.Secret:
        secret = _native.Secret.zeros(length)
        with ffi.from_buffer(secret) as out, NoFork():
            given = (label, len(label), context, len(context), 1)
            if lib.SSL_export_keying_material(self._tls._ssl, out, length, *given) != 1:
                _forget_errors()
                raise MalformedSetup(f"{self.who}: TLS could not derive the link's keys")
        return secret

    def _sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        at = 0
        while at < len(data):
            with memoryview(data) as left, left[at:] as rest, _Call(self):
                try:
                    at += self._tls.send(rest)
                    continue
                except SSL.WantWriteError:
                    pass
            yield

    def message_now(self, most: int = MAX_SETUP_BYTES) -> bytearray | None:
        """Nearly always a TLS record is a message, and one call reads it."""
        if self._announced is None and not self._at and not self._ahead:
            room = bytearray(_RECORD_BYTES)
            with Erased(room), memoryview(room) as view:
                count = self.receive_some(view)
                if not count:
                    return None
                if count == 4 + int.from_bytes(room[:4], "big"):
                    self._allowed(count - 4, most)
                    return room[4:count]
                self._ahead = room[:count]
        return super().message_now(most)

    def receive_some(self, into: memoryview) -> int:
        if self._ahead:
            count = min(len(into), len(self._ahead))
            ahead, self._ahead = self._ahead, self._ahead[count:]
            with Erased(ahead), memoryview(ahead) as read, read[:count] as part:
                into[:count] = part
            return count
        while self._late <= _MOST_LATE:
            before = self._late
            with ffi.from_buffer(into) as out, _Call(self):
                try:
                    return self._read(out, len(into))
                except (SSL.WantReadError, SSL.WantWriteError):
                    if self._late == before:
                        return 0
        raise MalformedSetup(f"{self.who} goes on with TLS's handshake after its end")

    def _read(self, into: Any, count: int) -> int:
        read: int = lib.SSL_read(self._tls._ssl, into, count)
        self._tls._raise_ssl_error(self._tls._ssl, read)
        return read

    def _drop(self) -> None:
        """Frees OpenSSL's state and keys, also where the Python objects are still held.

        The traceback of the error that ended the connection holds them. The private key of a
        handshake that has not ended is freed with them. OpenSSL does not overwrite the connection's
        secrets when it frees them. The descriptor is not its own.
        """
        _native.erase(self._ahead)
        tls: SSL.Connection | None = self.__dict__.pop("_tls", None)
        if tls is None:
            return
        overwritten = _native.FreedMemoryOverwritten()
        tls._reverse_mapping.pop(tls._ssl, None)  # the address may be another connection's soon
        with NoFork():
            ffi.release(tls._ssl)
        tls._ssl = tls._context = None  # type: ignore[assignment]
        self._key = None
        del overwritten

    def _run(self, call: Callable[[], T]) -> T:
        while True:
            with _Call(self):
                try:
                    return call()
                except SSL.WantReadError:
                    event = select.POLLIN
                except SSL.WantWriteError:
                    event = select.POLLOUT
            self._wait(event)

    def named(self, problem: Exception) -> SealringError | None:
        """The error that one of TLS's stands for."""
        if isinstance(problem, SSL.ZeroReturnError | SSL.SysCallError | OSError):
            if self._alert is not None:
                return from_alert(self._alert, self.who)
            return PeerUnreachable(f"{self.who} closed the connection during set-up")
        if not isinstance(problem, SSL.Error):
            return None
        # Our own verdict first: after it the peer's alert, if any, is only an answer.
        if self._verify_code is not None:
            return from_verify_code(self._verify_code, self.who, self._claimed_rank)
        if self._alert is not None:
            return from_alert(self._alert, self.who)
        return from_reason(_reason(problem), self.who)

    def on_certificate(self, certificate: crypto.X509, code: int, depth: int, ok: int) -> bool:
        """OpenSSL's verdict on each certificate of the chain, which stands, with one delay.

        A worker's own dates are not judged here but in `identity.verify`, which each end calls as
        soon as TLS is up and without which there is no VerifiedPeer. By then the peer has proved to
        hold the key, so an old certificate that somebody replays cannot pass for a member's, and
        the refusal can say "expired" or "not yet valid", for which TLS has one alert.
        """
        if ok or (depth == 0 and code in _DATES):
            return True
        if depth == 0:
            # Only for the log; a strange certificate must not choose which exception we raise.
            with contextlib.suppress(Exception):
                self._claimed_rank = claims_of(certificate.to_cryptography()).name.rank
        self._verify_code = code
        return False

    def _on_info(self, _: SSL.Connection, where: int, value: int) -> None:
        # The low byte is the alert; 0 is close_notify, which is no failure.
        if where == SSL.SSL_CB_READ_ALERT and value & 0xFF:
            self._alert = value & 0xFF
        elif self.established and where in (SSL.SSL_CB_ACCEPT_LOOP, SSL.SSL_CB_CONNECT_LOOP):
            self._late += 1


class _Allocated(SSL.Connection):
    """pyOpenSSL would hand OpenSSL the null pointer that it got from it where memory lacks."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_ssl" and value == ffi.NULL:
            _forget_errors()
            raise MemoryError("OpenSSL has no memory for a connection")
        super().__setattr__(name, value)


class _Call:
    """A call of TLS: no fork in it, and its errors get sealring's names.

    Every set-up message takes several.
    """

    __slots__ = ("_connection", "_no_fork")

    def __init__(self, connection: TlsConnection) -> None:
        self._connection = connection
        self._no_fork = NoFork()

    def __enter__(self) -> None:
        self._no_fork.__enter__()

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        self._no_fork.__exit__()
        if isinstance(problem, Exception) and (named := self._connection.named(problem)):
            raise named from problem


@functools.lru_cache(maxsize=_MOST_CONTEXTS)
def context_for(authorities: tuple[x509.Certificate, ...], *, dialer: bool) -> SSL.Context:
    """Of all connections that believe these authorities: making one takes 0.4 ms.

    It has no secret in it. A worker's certificate and private key are given to each connection for
    its handshake. No TLS session can be resumed: OpenSSL's tickets name sessions of a cache that is
    off.
    """
    return new_context(authorities, dialer=dialer)


def new_context(authorities: tuple[x509.Certificate, ...], *, dialer: bool) -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(_CIPHERSUITES)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION)
    context.set_options(_CLEANSE_PLAINTEXT)
    # Every peer has the authority; what it needs is the worker's certificate alone.
    context.set_mode(_NO_AUTO_CHAIN)
    store = context.get_cert_store()
    assert store is not None
    for authority in authorities:
        store.add_cert(crypto.X509.from_cryptography(authority))
    # PARTIAL_CHAIN: what the operator named is the trust anchor, self-signed or not.
    store.set_flags(crypto.X509StoreFlags.X509_STRICT | crypto.X509StoreFlags.PARTIAL_CHAIN)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _on_certificate)
    # `identity.verify` allows nothing between a worker and its authority. Here one step more is
    # allowed, because at 0 OpenSSL answers "too long" where "unknown issuer" is meant.
    context.set_verify_depth(1)
    if dialer:
        context.set_alpn_protos([ALPN])
    else:
        context.set_alpn_select_callback(_choose_protocol)
    return context


@functools.lru_cache(maxsize=1)
def _without_key() -> SSL.Context:
    return SSL.Context(SSL.TLS_METHOD)


@functools.lru_cache(maxsize=_MOST_CONTEXTS)
def _x509_of(certificate: x509.Certificate) -> crypto.X509:
    return crypto.X509.from_cryptography(certificate)


# In a forked child: a thread of the parent may hold a lock of OpenSSL in one of them.
for _cached in (context_for, _without_key, _x509_of):
    os.register_at_fork(after_in_child=_cached.cache_clear)


def identify(tls: SSL.Connection, credentials: Credentials, key: LoadedKey) -> None:
    """Give the connection this worker's certificate and private key."""
    certificate = _x509_of(credentials.certificate)
    # OpenSSL compares the key with the certificate that it has by then.
    if (
        lib.SSL_use_certificate(tls._ssl, certificate._x509) != 1
        or lib.SSL_use_PrivateKey(tls._ssl, key.pointer) != 1
    ):
        _forget_errors()
        raise ConfigurationError("OpenSSL does not take this worker's private key")


def _forget_errors() -> None:
    """OpenSSL keeps them by thread, and would lay them to the next connection that it serves."""
    lib.ERR_clear_error()


def _on_certificate(
    tls: SSL.Connection, certificate: crypto.X509, code: int, depth: int, ok: int
) -> bool:
    connection: TlsConnection = tls.get_app_data()
    return connection.on_certificate(certificate, code, depth, ok)


def _choose_protocol(
    _: SSL.Connection, offered: list[bytes]
) -> bytes | SSL._NoOverlappingProtocols:
    return ALPN if ALPN in offered else SSL.NO_OVERLAPPING_PROTOCOLS


def _reason(problem: SSL.Error) -> str:
    """OpenSSL's words for the first error in its queue."""
    queue = problem.args[0] if problem.args else []
    if isinstance(queue, list) and queue and len(queue[0]) == 3:
        return str(queue[0][2])
    return "unknown"
