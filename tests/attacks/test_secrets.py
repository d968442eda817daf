"""A secret in memory: what a forked child can use of it, and what is left after a wipe."""

from __future__ import annotations

import pickle

import pytest

from sealring import _native
from sealring.errors import ForkedProcess
from tests.attacks.children import in_child


@pytest.mark.threat("K21")
def test_a_secret_in_a_forked_child() -> None:
    secret = _native.Secret.random(32)
    for use in (
        lambda: bytes(secret),
        lambda: secret.seal(bytes(12), b"", b""),
        lambda: secret.derive(b"", b"", 32),
        lambda: secret.hmac_sha256(b""),
        lambda: secret.part(0, 1),
        lambda: secret.write_hex(bytearray(64)),
        lambda: secret == _native.Secret.zeros(32),
    ):
        assert in_child(use) == "ForkedProcess"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)
    assert repr(secret) == "<Secret of 32 bytes>"


@pytest.mark.threat("K22")
def test_a_wiped_secret_never_seals() -> None:
    secret = _native.Secret.random(32)
    sealed = secret.seal(bytes(12), b"text", b"")
    assert secret.open(bytes(12), sealed, b"") == b"text"
    secret.wipe()
    for use in (
        lambda: secret.seal(bytes(12), b"text", b""),
        lambda: secret.open(bytes(12), sealed, b""),
        lambda: secret.derive(b"", b"", 32),
    ):
        with pytest.raises(RuntimeError, match="wiped"):
            use()


def test_the_error_says_what_to_do() -> None:
    mark = _native.ProcessMark()

    def use() -> str:
        try:
            mark.require("this process group")
        except ForkedProcess as error:
            return str(error)
        return "no error"

    assert mark.here
    text = in_child(use)
    assert text.startswith(
        "this process group belongs to the process that this one was forked from"
    )
    assert "a group of its own" in text
