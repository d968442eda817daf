"""Checks that an error about a lost or silent rank has all its facts."""

from __future__ import annotations

import socket

from sealring.errors import GroupError, PeerLost, PeerSilent


def assert_names(
    error: object, rank: int, collective: int, operation: str, *kinds: type[GroupError]
) -> None:
    """Asserts that the error is one of `kinds` and names the rank, its host and the collective."""
    assert type(error) in (kinds or (PeerLost, PeerSilent)), repr(error)
    assert isinstance(error, GroupError)
    text = str(error)
    assert error.peer == rank, text
    assert error.host == socket.gethostname(), text
    assert (error.operation, error.collective) == (operation, collective), text
    assert f"rank {rank} on {socket.gethostname()}" in text
    assert f"{operation}, collective {collective}" in text
    assert f"rank {rank} was last seen" in text
