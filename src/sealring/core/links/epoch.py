"""One name for one attempt to make a group, which all its members share and no other attempt has.

A store outlives attempts, and no count tells them apart for everybody: a worker that died before
it got here missed one, and torchrun's restart count differs between machines of which only one saw
the failure. So the lowest rank draws the epoch, and answers the token of each rank:

    sealring/epoch/ask/<rank>       <token>           by that rank, fresh for each attempt
    sealring/epoch/answer/<rank>    <epoch> <token>   by the lowest rank

A rank that reads its own token knows that the answer was not given before it asked. The lowest rank
may be in the earlier attempt still, where others have left it already: it would answer with that
one's epoch, so a rank takes no epoch twice. A store that lies can only make the ranks disagree,
which the handshake tells them.

Groups within torch's default group are of the processes that formed it. The name of that set, its
`run`, is in the keys above and in the epoch: where a job was started twice, the two runs do not
meet in them, and a store that leads them together makes them disagree.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from sealring.core.handshake.terms import digest_of, is_instance
from sealring.core.links.rendezvous import Store, StoreCalls
from sealring.core.links.threads import Job, borrow
from sealring.core.no_fork import OwnLock
from sealring.errors import PeerUnreachable

_LOG = logging.getLogger("sealring")

_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.25
_BEYOND_SECONDS: Final = 2 * _LONGEST_PAUSE_SECONDS
"""How long after the deadline a rank that asks has found that it was not answered."""
_TOGETHER_SECONDS: Final = 0.008
"""So long the lowest rank asks the store whether all have come, which is one request. All who have
are read with one more, and answered with one. From then on it looks at each that is missing."""
_FIRST_AGAIN_SECONDS: Final = 0.05
_AGAIN_SECONDS: Final = 1.0
"""How often, at most, a rank writes the same token again, and one that was answered is looked at.
A store serves one request at a time, and in a large world most requests would be these."""
_MAX_VALUE_BYTES: Final = 128
_MOST_TAKEN: Final = 4096
"""Of those that ranks of this process took last."""


@contextmanager
def agreed_epoch(
    store: Store, members: Sequence[int], rank: int, deadline: float, *, within: str = ""
) -> Iterator[str]:
    """The epoch; held open while the group is made, because others may still have to ask.

    `within` is the run of the default group whose processes the members are.
    """
    lowest = min(members)
    calls, keys = StoreCalls(deadline), _Keys(within)
    if rank != lowest:
        yield epoch_from(within, _ask(store, calls, keys, rank, lowest, deadline))
        return
    drawn = secrets.token_hex(16)
    others = [member for member in members if member != rank]
    ended = threading.Event()
    if not others:
        yield epoch_from(within, drawn)
        return
    answering: Job | None = None
    try:
        # In here, because Ctrl-C may come when the thread has started: it would answer for ever.
        answering = borrow(
            "sealring-epoch", lambda: _answer(store, calls, keys, others, drawn, ended)
        )
        yield epoch_from(within, drawn)
    finally:
        ended.set()
        calls.end()
        if answering is not None:
            answering.join()


def run_of(transcript: bytes) -> str:
    """Names the processes that formed a group, to a store, which must not see the transcript."""
    return digest_of([b"sealring 2 run", transcript])[:16].hex()


def epoch_from(within: str, drawn: str) -> str:
    if not within:
        return drawn
    return digest_of([b"sealring 2 epoch", within.encode(), drawn.encode()])[:16].hex()


class _Keys:
    def __init__(self, within: str) -> None:
        self._prefix = f"sealring/epoch/{within}/" if within else "sealring/epoch/"

    def ask(self, rank: int) -> str:
        return f"{self._prefix}ask/{rank}"

    def answer(self, rank: int) -> str:
        return f"{self._prefix}answer/{rank}"


def _ask(
    store: Store, calls: StoreCalls, keys: _Keys, rank: int, lowest: int, deadline: float
) -> str:
    began, ended = time.monotonic(), threading.Event()
    try:
        # All questions in one call: each of its own would take longer than its answer.
        epoch = calls.make(lambda: _answered(store, keys, rank, deadline, ended), _BEYOND_SECONDS)
    except Exception as problem:
        raise PeerUnreachable(f"the rendezvous store cannot be used: {problem}") from problem
    finally:
        ended.set()
    if epoch is None:
        raise PeerUnreachable(
            f"rank {lowest} did not appear in the rendezvous store within "
            f"{deadline - began:.3g} s: look at its log, and check that all workers use one "
            "rendezvous",
            peer=lowest,
        )
    return epoch


def _answered(
    store: Store, keys: _Keys, rank: int, deadline: float, ended: threading.Event
) -> str | None:
    """None if the lowest rank does not answer in time."""
    token = secrets.token_hex(16)
    pause = _FIRST_PAUSE_SECONDS
    next_write = time.monotonic()
    while not ended.is_set():
        # Again and again: another writer there must not make us wait for ever.
        if time.monotonic() >= next_write:
            store.set(keys.ask(rank), token)
            next_write = time.monotonic() + _AGAIN_SECONDS
        ended.wait(pause)
        epoch, _, answered = _read(store, keys.answer(rank)).partition(" ")
        if answered == token and is_instance(epoch) and _take(rank, epoch):
            return epoch
        if time.monotonic() >= deadline:
            break
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return None


_taken: Final[dict[tuple[int, str], None]] = {}
_taken_lock: Final = OwnLock()


def _take(rank: int, epoch: str) -> bool:
    """Whether this rank has not taken it before."""
    with _taken_lock:
        if (rank, epoch) in _taken:
            return False
        _taken[rank, epoch] = None
        if len(_taken) > _MOST_TAKEN:
            del _taken[next(iter(_taken))]
        return True


def _answer(
    store: Store,
    calls: StoreCalls,
    keys: _Keys,
    others: Sequence[int],
    epoch: str,
    ended: threading.Event,
) -> None:
    answered: dict[int, str] = {}
    pause, pause_of_answered = _FIRST_PAUSE_SECONDS, _FIRST_AGAIN_SECONDS
    next_look = time.monotonic() + pause_of_answered
    while not ended.wait(pause):
        asking = [rank for rank in others if rank not in answered]
        if time.monotonic() >= next_look:
            # What was answered may have been the token of an earlier attempt.
            asking = list(others)
            pause_of_answered = min(2 * pause_of_answered, _AGAIN_SECONDS)
            next_look = time.monotonic() + pause_of_answered
        new: dict[int, str] = {}
        try:
            tokens = calls.make(
                functools.partial(_tokens, store, keys, asking, singly=pause >= _TOGETHER_SECONDS)
            )
            new = {
                rank: token
                for rank, token in zip(asking, tokens, strict=False)
                if is_instance(token) and answered.get(rank) != token
            }
            if new:
                where = [keys.answer(rank) for rank in new]
                values = [f"{epoch} {token}" for token in new.values()]
                calls.make(functools.partial(store.multi_set, where, values))
                answered |= new
        except Exception as problem:  # those who ask say so as well, and they fail by it
            if ended.is_set():
                return
            _LOG.warning("sealring: the rendezvous store cannot be used: %s", problem)
            return
        if not new:
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _tokens(store: Store, keys: _Keys, asking: Sequence[int], *, singly: bool) -> list[str]:
    """Of those who ask: all of them if all have come, else none, or `singly` those who have."""
    where = [keys.ask(rank) for rank in asking]
    if where and store.check(where):
        return [_text(raw) for raw in store.multi_get(where)]
    return [_read(store, key) for key in where] if singly else []


def _read(store: Store, key: str) -> str:
    """What is there, if it can be something of ours; a key that is not there would block."""
    return _text(store.get(key)) if store.check([key]) else ""


def _text(raw: bytes) -> str:
    return bytes(raw).decode("ascii", "replace") if len(raw) <= _MAX_VALUE_BYTES else ""
