"""TLS contexts: connections that a worker sets up at once share one, and nothing else does."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from dataclasses import replace

from OpenSSL import SSL
from OpenSSL._util import lib

from sealring.errors import UnknownAuthority
from sealring.handshake import tls
from sealring.handshake.tls import TlsConnection
from sealring.identity import Credentials
from tests.handshake.meeting import connected, in_background, meeting, soon, terms
from tests.identity.issuing import Issuer

ISSUER, OTHER = Issuer(), Issuer()
Client = tuple[socket.socket, SSL.Connection, TlsConnection]


def contexts_of(credentials: Credentials) -> list[SSL.Context]:
    return [
        context
        for (certificate, *_), context in tls._contexts.items()
        if certificate == credentials.certificate
    ]


def test_a_context_is_shared_while_connections_use_it_and_ends_with_the_last() -> None:
    one, zero = ISSUER.credentials(1), ISSUER.credentials(0)
    with meeting((one, terms(1)), (zero, terms(0))) as first:
        first.channels()
        (shared,) = contexts_of(one)
        with meeting((one, terms(1)), (zero, terms(0))) as second:
            second.channels()
            assert contexts_of(one) == [shared]
        assert contexts_of(one) == [shared], "the first connection still uses it"
        del shared
    assert not contexts_of(one), "the private key is in OpenSSL's memory for no connection"
    assert not contexts_of(zero)


def test_the_two_ends_and_other_certificates_have_contexts_of_their_own() -> None:
    one, zero = ISSUER.credentials(1), ISSUER.credentials(0)
    renewed = ISSUER.credentials(1)
    with (
        meeting((one, terms(1)), (zero, terms(0))) as first,
        meeting((renewed, terms(1)), (zero, terms(0))) as second,
    ):
        first.channels()
        second.channels()
        assert contexts_of(one) != contexts_of(renewed)
        assert len(contexts_of(zero)) == 1, "as the acceptor of both"


def test_a_shared_context_does_not_widen_whom_a_worker_believes() -> None:
    """The same certificate with one authority more, and at the same time without it."""
    zero, stranger = ISSUER.credentials(0), OTHER.credentials(1)
    both = (*zero.authorities, *stranger.authorities)
    trusting = replace(zero, authorities=both)
    with meeting((replace(stranger, authorities=both), terms(1)), (trusting, terms(0))) as open_one:
        open_one.channels()
        with meeting((replace(stranger, authorities=both), terms(1)), (zero, terms(0))) as refused:
            assert type(refused.acceptor) is UnknownAuthority


def test_a_forked_child_waits_for_no_thread_of_its_parent_and_has_none_of_its_contexts() -> None:
    zero = ISSUER.credentials(0)
    parents = tls._context_for(zero, dialer=True)
    with tls._contexts_lock:
        process = os.fork()
        if process == 0:
            signal.alarm(20)
            own = tls._context_for(ISSUER.credentials(0), dialer=True)
            os._exit(list(tls._contexts.values()) != [own] or own is parents)
        assert os.waitpid(process, 0) == (process, 0)


def test_no_tls_session_is_resumed_under_a_shared_context() -> None:
    zero = ISSUER.credentials(0)

    def handshake(offered: SSL.Session | None) -> Client:
        near, far = connected()
        acceptor = TlsConnection(far, zero, dialer=False, who="a client", deadline=soon())
        near.setblocking(True)
        client = SSL.Connection(client_context, near)
        client.set_connect_state()
        if offered is not None:
            client.set_session(offered)
        with in_background(acceptor.handshake) as ended:
            client.do_handshake()
        assert not isinstance(ended[0], BaseException), ended
        # A ticket would come with the first bytes.
        acceptor.send(b"!")
        assert client.recv(1) == b"!"
        return near, client, acceptor

    client_context = tls._new_context(ISSUER.credentials(1), dialer=True)
    client_context.set_session_cache_mode(SSL.SESS_CACHE_CLIENT)
    client_context.set_verify(SSL.VERIFY_NONE, lambda *_: True)
    near, client, acceptor = handshake(None)
    with closing(near), closing(acceptor):
        session = client.get_session()
        assert session is not None
        again, resumed, second = handshake(session)
        with closing(again), closing(second):
            assert len(contexts_of(zero)) == 1
            assert not lib.SSL_session_reused(resumed._ssl)
