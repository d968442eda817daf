"""Kills a child process at its Nth step on the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

STEPS = ("open", "mkdir", "replace", "rename", "fsync", "unlink", "rmdir", "link")
"""The calls that change the disk or make a change last; sealed chunks do not use them."""


def killed_at(step: int, action: Callable[[], object], calls: Sequence[str] = STEPS) -> bool:
    """Runs the action in a child that gets SIGKILL at that step; returns False if it finished."""
    child = os.fork()
    if child == 0:
        try:
            _count_down(step, calls)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with status {status}"
    return status != 0


def _count_down(step: int, calls: Sequence[str]) -> None:
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **others: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*arguments, **others)

        return call

    for name in calls:
        setattr(os, name, counted(getattr(os, name)))
