"""The listeners of this process, which share one bound on connections that prove nothing."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sized
from typing import Final, Protocol

from sealring.core.links.unproven import limits


class Sharer(Protocol):
    """A listener, as far as the others matter to it."""

    @property
    def silent(self) -> Sized: ...
    @property
    def greeting(self) -> Sized: ...
    def close_descriptors(self) -> None: ...


_open: Final[weakref.WeakSet[Sharer]] = weakref.WeakSet()
_opening = threading.Lock()
"""Held by a thread that changes `_open` or looks through it."""


def join(listener: Sharer) -> None:
    with _opening:
        _open.add(listener)


def leave(listener: Sharer) -> None:
    with _opening:
        _open.discard(listener)


def share_of(listener: Sharer) -> tuple[int, int]:
    """How many silent and how many greeting connections it may have now."""
    with _opening:
        others = [each for each in _open if each is not listener]
    return limits(
        len(others) + 1,
        sum(len(each.silent) for each in others),
        sum(len(each.greeting) for each in others),
    )


def _close_in_child() -> None:
    """A child that outlives its parent must not keep the parent's port open: peers would wait."""
    global _opening
    _opening = threading.Lock()  # a thread of the parent may hold it
    for listener in list(_open):
        listener.close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)
