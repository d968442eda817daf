"""A command whose program is not trusted: it ends in time, and what it prints takes no memory."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Final

_KEPT: Final = 2000
_BLOCK: Final = 1 << 16
_GRACE_SECONDS: Final = 60.0
"""For a launcher to end its workers, which it kills after half of this."""


def execute(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> tuple[bool, str]:
    """Whether it failed, and the end of what it printed."""
    # Not as a context: it would wait for the end of the stream, which a child may hold for ever.
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    tail = _Tail(process.stdout)
    try:
        failed = process.wait(timeout) != 0
    except subprocess.TimeoutExpired:
        return True, f"it took longer than {timeout:g} s"
    finally:
        _end(process)
    return failed, tail.text()


def _end(process: subprocess.Popen[bytes]) -> None:
    """By a signal that it can pass on to its children, and then by one that it cannot ignore."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Tail:
    """Reads all of a stream, and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while block := self._stream.read(_BLOCK):
                self._kept = (self._kept + block)[-_KEPT:]

    def text(self) -> str:
        """After the process has ended. A child that goes on may still hold the stream."""
        self._thread.join(1.0)
        return self._kept.decode("utf-8", "replace")
