"""Errors contain the words that scripts and tools look for in Gloo's."""

from __future__ import annotations

import pytest

from sealring.engine.failures import Fields, Names, error_from
from sealring.errors import GroupError, OutOfStep, PeerLost, PeerSilent

VIEW = "{operation=1 algorithm=0 dtype=1 reduction=1 root=0 bytes=12}"


@pytest.mark.parametrize(
    ("fields", "kind", "begins"),
    [
        (
            (6, 1, 2, -1, "the peer did not come to this collective for 0.001000 s"),
            PeerSilent,
            "Timed out waiting 1ms: the peer did not come",
        ),
        (
            (6, 1, 2, -1, "nothing came from the peer for 1800.000000 s"),
            PeerSilent,
            "Timed out waiting 1800000ms: nothing came",
        ),
        ((5, 1, 2, -1, "the peer left the group"), PeerLost, "Connection closed by peer: the peer"),
        (
            (5, 1, 2, 2, "the peer closed the connection"),
            PeerLost,
            "rank 7 reported: Connection closed by peer: the peer",
        ),
        ((5, 1, 2, -1, "the peer failed and could not say why"), PeerLost, "the peer failed"),
        (
            (4, 1, 2, -1, f"rank 0 is in {VIEW} and rank 1 is in {VIEW}"),
            OutOfStep,
            "Detected mismatch between collectives on ranks: rank 3 is in",
        ),
        ((4, 1, 2, -1, "the peer cuts the tensor differently"), OutOfStep, "the peer cuts"),
    ],
)
def test_an_error_begins_with_known_words(
    fields: Fields, kind: type[GroupError], begins: str
) -> None:
    error = error_from(fields, Names(0, (3, 5, 7)))
    assert type(error) is kind
    assert str(error).startswith(begins)
