"""A process that holds keys shows its memory to no other process of the same user.

Linux lets a user's processes read and write each other's memory and open each other's files
through /proc and ptrace, and writes a crashed process's memory to a core file. A process can
decline all of that (PR_SET_DUMPABLE). A worker does so before it reads a secret or a private key
and before it makes a group. This keeps out neither root nor a process with CAP_SYS_PTRACE, nor a
process that had opened the worker's memory before.

A child made by fork inherits this; a new program (exec) starts without it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

from sealring.errors import ConfigurationError

SETTING: Final = "SEALRING_ALLOW_DEBUGGERS"
_PR_SET_DUMPABLE: Final = 4


def allows_debuggers(environ: Mapping[str, str]) -> bool:
    """Whether debuggers, profilers that attach (py-spy) and core files were asked for."""
    chosen = environ.get(SETTING) or "0"
    if chosen not in ("0", "1"):
        raise ConfigurationError(f"{SETTING} is {chosen!r}; set it to 0 or 1, or unset it")
    return chosen == "1"


def shut_out_debuggers(environ: Mapping[str, str] | None = None) -> None:
    """Called before anything secret is in this process's memory."""
    if allows_debuggers(os.environ if environ is None else environ):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigurationError(
            f"this process's memory cannot be shut to debuggers ({reason}): allow prctl, or set "
            f"{SETTING}=1 to train with memory that every process of this user can read"
        )
