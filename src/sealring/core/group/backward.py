"""Makes a failure inside DDP's backward pass arrive in the script as the exception it is.

DDP waits for its all-reduces in C++, inside the autograd engine, and torch turns whatever fails
there into a RuntimeError that has our text but not our type: `except sealring.errors.PeerLost`
would not see it. The engine object that `backward()` calls is a plain attribute of torch's; ours
is torch's own with three additions: on the way out it puts the original exception back, and raises
a deferred error (deferred_errors.py), and while it waits Ctrl-C gets through (interrupts.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from torch.autograd import Variable

from sealring.core.engine.failures import unraised
from sealring.core.group.deferred_errors import raise_deferred_errors
from sealring.core.group.interrupts import heeding_interrupts
from sealring.errors import GroupError

_recent_failures: Final[deque[GroupError]] = deque(maxlen=16)


def remember(failure: BaseException) -> None:
    """Keep a collective's failure for the backward pass that may be waiting for it."""
    if isinstance(failure, GroupError):
        _recent_failures.append(unraised(failure))


def restore_errors_in_backward() -> None:
    """Called when a group is made; once per process is enough."""
    if not isinstance(Variable._execution_engine, _RestoringEngine):
        Variable._execution_engine = _RestoringEngine()


class _RestoringEngine(type(Variable._execution_engine)):  # type: ignore[misc]
    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        try:
            with heeding_interrupts():
                gradients = super().run_backward(*arguments, **options)
        except RuntimeError as error:
            text = str(error)
            for failure in reversed(_recent_failures):
                if str(failure) in text:
                    raise failure from error
            raise
        raise_deferred_errors()
        return gradients
