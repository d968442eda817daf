"""This process's socket: made with its first group, removed at its end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from sealring.core.hooks import GroupMade, Made
from sealring.errors import ConfigurationError
from sealring.observe.directory import SETTING, PrivateDirectory, chosen_directory
from sealring.observe.gather import socket_status, worker_status
from sealring.observe.server import StatusServer, bounded, remove_stale
from sealring.observe.status import encode

_LOG = logging.getLogger("sealring")
_lock = threading.Lock()
_server: StatusServer | None = None
_latest: GroupMade | None = None
_tried: Path | None = None


def observe_groups(environ: Mapping[str, str]) -> Made:
    directory = chosen_directory(environ)

    def made(group: GroupMade) -> None:
        if directory is not None:
            show(directory, group)

    return made


def show(directory: Path, group: GroupMade) -> None:
    """From here on this process answers in `directory`; a later call replaces what was said."""
    global _latest, _server, _tried
    with _lock:
        _latest = group
        if _tried == directory:
            return
        _tried = directory
        if _server is not None:
            _server.close()
            _server = None
        try:
            _server = _start(PrivateDirectory(directory, create=True))
        except (OSError, RuntimeError, ConfigurationError) as problem:  # no thread: RuntimeError
            _LOG.warning(
                "sealring: `sealring top` will not show this worker: %s. %s=0 switches it off",
                problem, SETTING,
            )  # fmt: skip


def _start(directory: PrivateDirectory) -> StatusServer:
    try:
        return StatusServer(directory, {"status": _status, "sockets": _sockets})
    except BaseException:
        directory.close()
        raise


def _status() -> bytes:
    assert _latest is not None
    return bounded(encode("status", worker_status(_latest)))


def _sockets() -> bytes:
    assert _latest is not None
    readers = set() if _server is None else _server.connections()
    return bounded(encode("sockets", socket_status(_latest, without=readers)))


def socket_path() -> Path | None:
    """Of this process, if it answers."""
    return None if _server is None else _server.path


def sweep(environ: Mapping[str, str]) -> None:
    """Removes what workers left that were killed; for the launcher, when all have ended."""
    with contextlib.suppress(OSError, ConfigurationError):
        if (path := chosen_directory(environ)) is not None:
            directory = PrivateDirectory(path)
            try:
                remove_stale(directory)
            finally:
                directory.close()


@atexit.register
def _end() -> None:
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        with contextlib.suppress(OSError):
            server.close()


def _forget() -> None:
    """A forked child is another process: it does not answer for its parent."""
    global _lock, _server, _latest, _tried
    server, _server, _latest, _tried, _lock = _server, None, None, None, threading.Lock()
    if server is not None:
        server.forget()


os.register_at_fork(after_in_child=_forget)
