"""A TLS 1.3 connection on a connected socket, with a deadline.

After TLS the native core reads records from the same socket, so TLS must not read a byte past its
own records. While read-ahead is off, which is the default, OpenSSL reads a record's header and then
exactly its body; test_raw_bytes_after_detach checks that.
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
    """A private key loaded into OpenSSL. OpenSSL frees it after this object and its connections."""

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, key: KeptKey) -> None:
        """Loads the key without pyOpenSSL's own function, which leaves copies of it in memory."""
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
        # Not freed in a __del__: that runs while another thread can still find this object.
        self.pointer: Any = ffi.gc(loaded, _free)


def _free(pointer: Any) -> None:
    overwritten = _native.FreedMemoryOverwritten()
    with NoFork():
        lib.EVP_PKEY_free(pointer)
    del overwritten


_lock: Final = OwnLock()
_loaded: Final[weakref.WeakValueDictionary[KeptKey, LoadedKey]] = weakref.WeakValueDictionary()
# A forked child has none of its parent's keys, and must not find one here.
os.register_at_fork(after_in_child=_loaded.clear)


def loaded(key: KeptKey) -> LoadedKey:
    """The loaded key, for a handshake. While it is kept, the key is in unprotected memory."""
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
"""The most TLS messages after the handshake. An acceptor's OpenSSL sends two tickets, which are not
used; more messages have no place in a set-up."""
_RECORD_BYTES: Final = 16 << 10
"""The most bytes in a TLS record."""
_MOST_CONTEXTS: Final = 64
"""The most cached contexts. A worker needs two, and two more when its authority is replaced."""

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
        """Changes of TLS's state after its handshake: two for each ticket or new key."""
        self._ahead = bytearray()
        """Bytes of a record that were read but not taken yet."""
        self._key: LoadedKey | None = None
        """The private key, kept until it has signed."""
        self._tls = self._new_tls(credentials, dialer=dialer)

    @NoFork()
    def _new_tls(self, credentials: Credentials, *, dialer: bool) -> SSL.Connection:
        tls = _Allocated(context_for(credentials.authorities, dialer=dialer), self._socket)
        self._key = loaded(credentials.key)
        identify(tls, credentials, self._key)
        tls.set_app_data(self)
        tls.set_info_callback(self._on_info)
        # pyOpenSSL sets this mode. With it one call would read on as long as the peer sends TLS's
        # own messages, past any deadline.
        lib.SSL_clear_mode(tls._ssl, lib.SSL_MODE_AUTO_RETRY)
        if dialer:
            tls.set_connect_state()
        else:
            tls.set_accept_state()
        return tls

    def handshake(self) -> x509.Certificate:
        """Does TLS's handshake. Returns the certificate whose key the peer has used.

        The certificate's chain is checked, but not its dates: see `on_certificate`.
        """
        self._run(self._tls.do_handshake)
        return self._established()

    def advance(self) -> x509.Certificate | None:
        """Like `handshake`, without waiting: None while bytes of the peer are missing."""
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
        """Removes the private key from the connection, after the key has signed.

        A connection may live as long as a group takes to form. Its context is replaced by one
        without a certificate and key, so it has none then. What the handshake agreed on stays, and
        so do the connection's own settings.
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
        """Raises PeerIncompatible if TLS agreed on another key exchange or protocol."""
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

    # The next methods do not use pyOpenSSL's functions: those return `bytes`, which cannot be
    # overwritten.

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
        """The peer's next message. Nearly always it is one TLS record, which one call reads."""
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
        """Frees OpenSSL's state and keys, even if the Python objects are still referenced.

        The traceback of the error that ended the connection may reference them. This also frees the
        private key of an unfinished handshake. OpenSSL does not overwrite a connection's secrets
        when it frees them, so freed memory is overwritten here. The socket stays open.
        """
        _native.erase(self._ahead)
        tls: SSL.Connection | None = self.__dict__.pop("_tls", None)
        if tls is None:
            return
        overwritten = _native.FreedMemoryOverwritten()
        tls._reverse_mapping.pop(tls._ssl, None)  # another connection may get the address soon
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
        """The sealring error that an error of TLS stands for; None if it is no error of TLS."""
        if isinstance(problem, SSL.ZeroReturnError | SSL.SysCallError | OSError):
            if self._alert is not None:
                return from_alert(self._alert, self.who)
            return PeerUnreachable(f"{self.who} closed the connection during set-up")
        if not isinstance(problem, SSL.Error):
            return None
        # Our own verdict comes first: an alert of the peer is then only its answer.
        if self._verify_code is not None:
            return from_verify_code(self._verify_code, self.who, self._claimed_rank)
        if self._alert is not None:
            return from_alert(self._alert, self.who)
        return from_reason(_reason(problem), self.who)

    def on_certificate(self, certificate: crypto.X509, code: int, depth: int, ok: int) -> bool:
        """Accepts OpenSSL's verdict on each certificate of the chain, except for a worker's dates.

        `identity.verify` checks those dates as soon as TLS is up; without it there is no
        VerifiedPeer. By then the peer has proved that it holds the key, so a replayed old
        certificate does not let another process pass for a member. And the refusal can say
        "expired" or "not yet valid", for which TLS has only one alert.
        """
        if ok or (depth == 0 and code in _DATES):
            return True
        if depth == 0:
            # Only for the error's text: a malformed certificate must not choose the exception.
            with contextlib.suppress(Exception):
                self._claimed_rank = claims_of(certificate.to_cryptography()).name.rank
        self._verify_code = code
        return False

    def _on_info(self, _: SSL.Connection, where: int, value: int) -> None:
        # The low byte is the alert. 0 is close_notify, which is not a failure.
        if where == SSL.SSL_CB_READ_ALERT and value & 0xFF:
            self._alert = value & 0xFF
        elif self.established and where in (SSL.SSL_CB_ACCEPT_LOOP, SSL.SSL_CB_CONNECT_LOOP):
            self._late += 1


class _Allocated(SSL.Connection):
    """Raises MemoryError if OpenSSL has no memory; pyOpenSSL would go on with a null pointer."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_ssl" and value == ffi.NULL:
            _forget_errors()
            raise MemoryError("OpenSSL has no memory for a connection")
        super().__setattr__(name, value)


class _Call:
    """The context of a call of TLS: no fork happens in it, and it raises sealring's errors.

    A class and no generator, because every set-up message makes several such calls.
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
    """The context of all connections that trust these authorities. Cached: making one takes 0.4 ms.

    A context holds no secret: each connection gets the worker's certificate and private key for its
    handshake. No TLS session can be resumed, because OpenSSL's tickets refer to its cache, which is
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
    # Sends only the worker's certificate: every peer has the authority's.
    context.set_mode(_NO_AUTO_CHAIN)
    store = context.get_cert_store()
    assert store is not None
    for authority in authorities:
        store.add_cert(crypto.X509.from_cryptography(authority))
    # PARTIAL_CHAIN: the operator's authority is the trust anchor, even if it is not self-signed.
    store.set_flags(crypto.X509StoreFlags.X509_STRICT | crypto.X509StoreFlags.PARTIAL_CHAIN)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _on_certificate)
    # `identity.verify` allows no certificate between a worker and its authority. Here one is
    # allowed, because with 0 OpenSSL says "too long" where it should say "unknown issuer".
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


# A forked child makes its own: a thread of the parent may hold one of their OpenSSL locks.
for _cached in (context_for, _without_key, _x509_of):
    os.register_at_fork(after_in_child=_cached.cache_clear)


def identify(tls: SSL.Connection, credentials: Credentials, key: LoadedKey) -> None:
    """Gives the connection this worker's certificate and private key."""
    certificate = _x509_of(credentials.certificate)
    # The certificate first: OpenSSL compares the key with it.
    if (
        lib.SSL_use_certificate(tls._ssl, certificate._x509) != 1
        or lib.SSL_use_PrivateKey(tls._ssl, key.pointer) != 1
    ):
        _forget_errors()
        raise ConfigurationError("OpenSSL does not take this worker's private key")


def _forget_errors() -> None:
    """Clears OpenSSL's errors, which it keeps by thread and would report to another connection."""
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
    """OpenSSL's text for the first error in its queue."""
    queue = problem.args[0] if problem.args else []
    if isinstance(queue, list) and queue and len(queue[0]) == 3:
        return str(queue[0][2])
    return "unknown"
