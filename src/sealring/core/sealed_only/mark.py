"""The mark of sealed-only mode, which the kernel copies from a process to every child.

A variable is lost with `env -u`, in a shell's assignment, or where a program gives its child
another environment. A signal that a process ignores stays ignored in its children through fork and
exec, whatever program starts, and also where the child leaves its parent (setsid, nohup, a daemon).
So a sealed-only process ignores three real-time signals. It does not ignore the two between them: a
program that ignores every signal is not taken for a sealed-only one. No other process can put the
mark on this one, nothing is left to clean up, and a process ID that is used again has no old mark.

Some programs reset all signals before they start another (those written in Go do). So the processes
above this one are looked at as well: /proc shows which signals each of them ignores.
"""

from __future__ import annotations

from typing import Final

_IGNORED: Final = (42, 44, 46)
"""The kernel's numbers: a child may have another C library, which counts from another SIGRTMIN."""
_BETWEEN: Final = (43, 45)
_SIG_IGN: Final = 1


def _mask(signals: tuple[int, ...]) -> int:
    return sum(1 << (number - 1) for number in signals)


_MARK: Final = _mask(_IGNORED)
_COMPARED: Final = _mask(_IGNORED + _BETWEEN)


def put_on() -> None:
    """Marks this process, but for signals that it handles; a second call changes nothing."""
    import ctypes  # here: `import torch` loads this module in processes that are not sealed-only

    with open("/proc/self/status", "rb") as file:
        handled = _signals(file.read(), b"SigCgt")
    # Not signal.signal, which only the main thread may call.
    libc = ctypes.CDLL(None)
    for number in _IGNORED:
        if not handled & _mask((number,)):
            libc.signal(number, _SIG_IGN)


def is_inherited() -> bool:
    """Whether this process, or one above it, is marked."""
    process = b"self"
    while process != b"0":  # the parent of the first process
        try:
            with open(b"/proc/" + process + b"/status", "rb", buffering=0) as file:
                status = file.read()
        except OSError:
            # It has ended, or /proc hides it (hidepid). This process's own mark was read before.
            return False
        if _signals(status, b"SigIgn") & _COMPARED == _MARK:
            return True
        process = _field(status, b"PPid")
    return False


def _signals(status: bytes, name: bytes) -> int:
    return int(_field(status, name) or b"0", 16)


def _field(status: bytes, name: bytes) -> bytes:
    return status.partition(b"\n" + name + b":\t")[2].partition(b"\n")[0]
