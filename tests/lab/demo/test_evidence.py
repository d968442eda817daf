"""The search finds plaintext wherever it is, so an empty result means something."""

from __future__ import annotations

import random

import pytest

from sealring.lab.demo.wiretap import SHORTEST_RUN, entropy, longest_plaintext_run

RANDOM = random.Random(5)
PLAIN = RANDOM.randbytes(4096)


@pytest.mark.parametrize("length", [SHORTEST_RUN, SHORTEST_RUN + 1, 16, 100, 4000])
@pytest.mark.parametrize("where", [0, 1, 2, 3, 7, 1001])
def test_a_piece_of_plaintext_is_found_wherever_it_lies(length: int, where: int) -> None:
    for start in range(4):
        stream = RANDOM.randbytes(where) + PLAIN[start : start + length] + RANDOM.randbytes(500)
        # A neighbouring byte may match by chance.
        assert length <= longest_plaintext_run(stream, [b"", PLAIN]) <= length + 2


def test_none_is_found_where_there_is_none() -> None:
    assert longest_plaintext_run(RANDOM.randbytes(1 << 16), [PLAIN]) == 0


def test_the_whole_plaintext_is_measured_once() -> None:
    assert longest_plaintext_run(PLAIN, [PLAIN]) == len(PLAIN)


@pytest.mark.parametrize(("stream", "plain"), [(b"", PLAIN), (PLAIN, b""), (b"abc", b"abc")])
def test_too_short_for_a_window_is_no_find(stream: bytes, plain: bytes) -> None:
    assert longest_plaintext_run(stream, [plain]) == 0


def test_entropy() -> None:
    assert entropy(b"") == 0
    assert entropy(b"aaaa") == 0
    assert entropy(b"abab") == 1
    assert entropy(bytes(range(256))) == 8
    assert 7.99 < entropy(RANDOM.randbytes(1 << 16)) < 8
