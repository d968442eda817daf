"""TLS contexts: connections with the same authorities share one, and it holds no secret."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from OpenSSL import SSL
from OpenSSL._util import lib

from sealring.core.handshake import tls
from sealring.core.handshake.tls import TlsConnection, loaded
from sealring.errors import ConfigurationError, named
from tests.core.handshake.meeting import connected, in_background, meeting, soon, terms
from tests.core.identity.issuing import Issuer

ISSUER, OTHER = Issuer(), Issuer()
Client = tuple[socket.socket, SSL.Connection, TlsConnection]


def test_the_connections_of_all_workers_share_a_context_for_each_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[bool] = []
    plain = tls.new_context

    def counted(*arguments: Any, dialer: bool) -> SSL.Context:
        made.append(dialer)
        return plain(*arguments, dialer=dialer)

    monkeypatch.setattr(tls, "new_context", counted)
    tls.context_for.cache_clear()
    for _ in range(2):
        with meeting((ISSUER.credentials(1), terms(1)), (ISSUER.credentials(0), terms(0))) as met:
            met.channels()
    assert sorted(made) == [False, True]


def test_each_connection_shows_its_own_certificate() -> None:
    one, two, zero = (ISSUER.credentials(rank) for rank in (1, 2, 0))
    with (
        meeting((one, terms(1)), (zero, terms(0))) as first,
        meeting((two, terms(2)), (zero, terms(0))) as second,
    ):
        assert first.channels()[1].peer.rank == 1
        assert second.channels()[1].peer.rank == 2


def test_a_key_that_is_not_the_certificates_is_refused_before_tls_begins() -> None:
    """The refusal leaves no OpenSSL error for the thread's next connection to find."""
    one, other = ISSUER.credentials(1), ISSUER.credentials(1)
    near, far = connected()
    with closing(near), closing(far), pytest.raises(ConfigurationError, match="private key"):
        TlsConnection(
            near, replace(one, key=other.key), dialer=True, who="the peer", deadline=soon()
        )
    assert lib.ERR_peek_error() == 0


def test_a_shared_context_does_not_widen_whom_a_worker_believes() -> None:
    """One certificate is checked by a worker with one more authority and by one without it."""
    zero, stranger = ISSUER.credentials(0), OTHER.credentials(1)
    both = (*zero.authorities, *stranger.authorities)
    trusting = replace(zero, authorities=both)
    with meeting((replace(stranger, authorities=both), terms(1)), (trusting, terms(0))) as open_one:
        open_one.channels()
        with meeting((replace(stranger, authorities=both), terms(1)), (zero, terms(0))) as refused:
            assert named(refused.acceptor) == "handshake.unknown_authority"


def test_a_forked_child_has_none_of_its_parents_contexts() -> None:
    authorities = ISSUER.credentials(0).authorities
    parents = tls.context_for(authorities, dialer=True)
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(tls.context_for(authorities, dialer=True) is parents)
    assert os.waitpid(process, 0) == (process, 0)
    assert tls.context_for(authorities, dialer=True) is parents


def test_no_tls_session_is_resumed_under_a_shared_context() -> None:
    zero = ISSUER.credentials(0)

    def handshake(offered: SSL.Session | None) -> Client:
        near, far = connected()
        acceptor = TlsConnection(far, zero, dialer=False, who="a client", deadline=soon())
        near.setblocking(True)
        client = SSL.Connection(client_context, near)
        own = ISSUER.credentials(1)
        tls.identify(client, own, loaded(own.key))
        client.set_connect_state()
        if offered is not None:
            client.set_session(offered)
        with in_background(acceptor.handshake) as ended:
            client.do_handshake()
        assert not isinstance(ended[0], BaseException), ended
        # A session ticket would come with the first bytes.
        acceptor.send(b"!")
        assert client.recv(1) == b"!"
        return near, client, acceptor

    client_context = tls.new_context(ISSUER.credentials(1).authorities, dialer=True)
    client_context.set_session_cache_mode(SSL.SESS_CACHE_CLIENT)
    client_context.set_verify(SSL.VERIFY_NONE, lambda *_: True)
    near, client, acceptor = handshake(None)
    with closing(near), closing(acceptor):
        session = client.get_session()
        assert session is not None
        again, resumed, second = handshake(session)
        with closing(again), closing(second):
            assert not lib.SSL_session_reused(resumed._ssl)
