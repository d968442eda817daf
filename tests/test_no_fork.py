"""A forked child can use OpenSSL, whatever the parent's threads were doing at that moment."""

from __future__ import annotations

import importlib
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from OpenSSL import SSL

from sealring import _native
from sealring.core import no_fork
from sealring.core.no_fork import NoFork
from tests.core.links.teams import Team

_FORKS = 100
_SECONDS = 60.0


def ends_well(child: Callable[[], object]) -> bool:
    """Tells whether a child that is forked now finishes the call."""
    process = os.fork()
    if process == 0:
        try:
            child()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return False


@pytest.mark.threat("K19")
def test_fork_waits_for_a_thread_that_is_in_openssl() -> None:
    left = False
    entered = threading.Event()

    def stay() -> None:
        nonlocal left
        with NoFork():
            entered.set()
            while not no_fork.forking:
                time.sleep(0.001)
            left = True

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()

    def has_left() -> None:
        assert left
        with NoFork():  # the child can enter
            pass

    assert ends_well(has_left)
    thread.join()
    assert not no_fork.forking
    assert not no_fork.inside


def test_a_thread_that_is_in_openssl_itself_can_fork() -> None:
    """A signal's handler can run, and fork, at any moment."""
    with NoFork(), NoFork():
        assert ends_well(lambda: None)
    assert not no_fork.inside


def test_the_thread_that_forks_can_free_a_key_meanwhile() -> None:
    """The garbage collector or a signal's handler may free a key inside any handler of fork()."""
    code = """
import os
keys = [None, None, None]
free = lambda: keys.pop()
os.register_at_fork(before=free, after_in_parent=free, after_in_child=free)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sealring.core.handshake.tls import LoadedKey
from sealring.core.identity.kept_key import KeptKey
keys = [LoadedKey(KeptKey.of(Ed25519PrivateKey.generate())) for _ in range(3)]
child = os.fork()
if child == 0:
    os._exit(len(keys))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 == len(keys)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=_SECONDS)


def use_openssl() -> None:
    """Uses each copy of OpenSSL: Python's, which the native core shares, and cryptography's."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    SSL.Context(SSL.TLS_METHOD)
    key = Ed25519PrivateKey.generate()
    key.public_key().verify(key.sign(b"said"), b"said")
    _native.Secret.random(32).derive(b"", b"", 32)


@pytest.mark.threat("K19")
def test_a_child_that_is_forked_while_groups_form_can_use_openssl() -> None:
    enough = threading.Event()
    made = 0

    def form_groups() -> None:
        nonlocal made
        while not enough.is_set():
            team = Team(9, range(9))
            team.form()
            made += len(team.groups) == team.size
            team.close()

    thread = threading.Thread(target=form_groups)
    thread.start()
    try:
        ended = [ends_well(use_openssl) for _ in range(_FORKS)]
    finally:
        enough.set()
        thread.join()
    assert ended == [True] * _FORKS
    assert made


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sealring.core.identity.secret", "_own_lock"),
        ("sealring.core.handshake.sessions", "_tables_lock"),
        ("sealring.attest.broker.enrolment", "_making"),
        ("sealring.core.group.operators", "_registering"),
    ],
)
def test_no_lock_on_the_way_to_a_group_is_held_in_a_child(module: str, name: str) -> None:
    """The thread that holds a lock does not exist in the child, which would wait without end."""
    place = importlib.import_module(module)

    def take() -> None:
        assert not getattr(place, name).locked()

    with getattr(place, name):
        assert ends_well(take)
