"""What `sealring run` prints last: why the job ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from sealring.cli.terminal import errors, harmless
from sealring.last_words import told_beside

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_OFTEN: Final[dict[int, str]] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer, which `dmesg` shows",
    signal.SIGSEGV: "native code used memory that is not its own",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that was cut",
    signal.SIGABRT: "native code called abort()",
}
"""Signals that no part of a job sends, and what most often causes them."""


def print_cause(failed: ChildFailedError) -> None:
    """The error that caused the others, as far as can be told: once, and after all else."""
    told = told_beside(failed.get_first_failure()[1].error_file)
    silent = sorted(failed.failures.keys() - {each.rank for each in told})
    # The launcher ends the others by SIGTERM: those are a cause only where nothing else is known.
    by_themselves = [rank for rank in silent if failed.failures[rank].exitcode != -signal.SIGTERM]
    if by_themselves or told:
        silent = by_themselves
    causes = [each for each in told if not each.follows]
    others = len({*failed.failures, *(each.rank for each in told)}) - 1
    ended = f"; {others} more ended with it" if others else ""
    if not causes and silent:
        # Killed, or ended by itself: what the others got follows from that.
        text = _without_error(silent[0], failed.failures[silent[0]].exitcode, ended)
    else:
        first = (causes or told)[0]
        above = ". Its traceback is above." if first.printed else ""
        text = f"{first.text} (rank {first.failed}{ended}){above}"
    errors.print(harmless(text), markup=False, highlight=False, soft_wrap=True)


def _without_error(rank: int, code: int, ended: str) -> str:
    """A worker that wrote no error may have printed something, unless a signal killed it."""
    if code >= 0:
        return f"Rank {rank} ended with exit code {code}{ended}. What it printed is above, if any."
    try:
        name = signal.Signals(-code).name
    except ValueError:  # of the real-time signals, which have numbers only
        name = f"signal {-code}"
    often = f"; {_OFTEN[-code]}" if -code in _OFTEN else ""
    return f"Rank {rank} was killed by {name}{often}{f' ({ended[2:]})' if ended else ''}."
