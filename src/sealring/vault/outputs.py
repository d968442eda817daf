"""Plaintext that is not finished: beside its output, found again if its process was killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sealring.vault.files import claim, claimed

_MARK: Final = ".sealring-unfinished-"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A name for the output in a directory of its own, which is removed afterwards in any case.

    A signal that ends the process removes it too. What a process that was killed has left of this
    output is removed first.
    """
    _remove_left(out)
    folder = out.with_name(f".{out.name[:150]}{_MARK}{secrets.token_hex(8)}")
    folder.mkdir(mode=0o700)
    with claim(folder), _ending_by_exception():
        try:
            yield folder / "content"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left(out: Path) -> None:
    """Removes the directories of this output whose processes have ended: they hold no lock."""
    if not out.parent.is_dir():
        return
    for name in os.listdir(out.parent):
        if not name.startswith(f".{out.name[:150]}{_MARK}"):
            continue
        with contextlib.suppress(OSError):  # it is another's, or gone meanwhile
            if not claimed(out.parent / name):
                shutil.rmtree(out.parent / name, ignore_errors=True)


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by SystemExit meanwhile, if they would end it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    changed = [one for one in _SIGNALS if signal.getsignal(one) == signal.SIG_DFL]
    for one in changed:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in changed:
            signal.signal(one, signal.SIG_DFL)
