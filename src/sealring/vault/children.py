"""Child processes get their keys through a connection that the child opens itself.

Another process of this user could take over descriptors that a new process inherits. So the child
inherits none. It first shuts other processes out of its memory, then connects to an address that
is not secret. The kernel tells each end the process number of the other end. The child must also
answer a question: the process that connected may have ended and left its connection to another
process, and its number may have been given to a new one.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from sealring import _native
from sealring.core.identity.process import CREDENTIALS, peer_of, shut_out_debuggers
from sealring.core.settings import ALLOW_DEBUGGERS, with_settings
from sealring.errors import SealringError, WorkerFailed, error_with
from sealring.formats.strict import read_json
from sealring.vault.keys import KEY_BYTES
from sealring.vault.sealed import Progress, shown

START_SECONDS: Final = 120.0
"""A child must connect within this time, also on a busy machine."""
END_SECONDS: Final = 5.0
_LARGEST_ORDER: Final = 64 << 20
_LARGEST_ANSWER: Final = 1 << 20
_LONGEST_REASON: Final = 800
_MOST_KEYS: Final = 8
_MOST_FILES: Final = 2
_QUESTION_BYTES: Final = 16
SHORTEST_WAIT: Final = 0.001
"""Seconds. With a timeout of 0 a socket raises another error than one whose time has passed."""


class Door:
    """An address at which this process listens for one child."""

    def __init__(self) -> None:
        self.address = f"sealring-helper-{secrets.token_hex(16)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listening.bind(b"\0" + self.address.encode())
        self._listening.listen(16)

    def accept(
        self,
        is_child: Callable[[int], bool],
        ended: Callable[[], int | None] = lambda: None,
        seconds: float = START_SECONDS,
    ) -> socket.socket:
        """Returns the child's connection, and closes those of other processes.

        `ended` returns the child's exit status once it has ended, else None.
        """
        self._listening.settimeout(0.1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                here, _ = self._listening.accept()
            except TimeoutError:
                if (status := ended()) is not None:
                    raise ConnectionError(f"it ended with status {status}") from None
                continue
            pid = peer_of(here).pid
            if is_child(pid) and _holds(here, pid, deadline) and is_child(pid):
                return here
            here.close()
        raise TimeoutError(f"it did not connect within {seconds:.0f} seconds")

    def close(self) -> None:
        self._listening.close()


def _holds(here: socket.socket, pid: int, deadline: float) -> bool:
    """Whether the process that connected still holds the connection and answers itself.

    It may have passed the connection on and ended; a new child may then get its number. The kernel
    adds the sender's number to each message.
    """
    question = secrets.token_bytes(_QUESTION_BYTES)
    came = b""
    try:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        here.sendall(question)
        while len(came) < len(question):
            here.settimeout(max(SHORTEST_WAIT, deadline - time.monotonic()))
            room = socket.CMSG_SPACE(CREDENTIALS.size)
            piece, added, _, _ = here.recvmsg(len(question) - len(came), room)
            senders = {
                CREDENTIALS.unpack(data)[0]
                for _, kind, data in added
                if kind == socket.SCM_CREDENTIALS
            }
            if not piece or senders != {pid}:
                return False
            came += piece
        here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        here.settimeout(None)
    except OSError:
        return False
    return came == question


def connect_to_parent(address: str) -> socket.socket:
    """Returns the child's connection, after other processes are shut out of its memory."""
    shut_out_debuggers()
    if not ALLOW_DEBUGGERS.read(os.environ) and tracer() != 0:
        raise ConnectionError("another process traced this one before it could shut debuggers out")
    parent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        parent.settimeout(START_SECONDS)
        parent.connect(b"\0" + address.encode())
        if peer_of(parent).pid != os.getppid():
            raise ConnectionError("the address is not that of the process that started this one")
        question = bytearray(_QUESTION_BYTES)
        fill(parent, memoryview(question))
        parent.sendall(question)
    except BaseException:
        parent.close()
        raise
    return parent


def tracer() -> int:
    """The number of the process that traces this one; 0 if there is none."""
    return _status_of("self", "TracerPid:")


def is_child(pid: int) -> bool:
    try:
        return _status_of(str(pid), "PPid:") == os.getpid()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _status_of(process: str, name: str) -> int:
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def fill(source: socket.socket, room: memoryview, deadline: float = math.inf) -> None:
    while room:
        if deadline < math.inf:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            source.settimeout(left)
        count = source.recv_into(room)
        if count == 0:
            raise ConnectionError("the process at the other end is gone")
        room = room[count:]


def send(
    to: socket.socket, document: Any, keys: Sequence[_native.Secret] = (), files: Sequence[int] = ()
) -> None:
    """Sends a JSON document with open files, then the keys, 32 bytes each.

    The keys are sent from their own memory, without a copy.
    """
    text = json.dumps([document, len(keys)]).encode()
    socket.send_fds(to, [len(text).to_bytes(4, "big")], files)
    to.sendall(text)
    for key in keys:
        assert len(key) == KEY_BYTES
        to.sendall(memoryview(key))


def receive(
    source: socket.socket, largest: int = _LARGEST_ORDER, deadline: float = math.inf
) -> tuple[dict[str, Any], list[_native.Secret]]:
    """Receives the document and the keys of one `send`. The kernel closes files sent with it."""
    head = bytearray(4)
    fill(source, memoryview(head), deadline)
    return _received(source, head, largest, deadline)


def _received(
    source: socket.socket, head: bytes | bytearray, largest: int, deadline: float = math.inf
) -> tuple[dict[str, Any], list[_native.Secret]]:
    size = int.from_bytes(head, "big")
    if size > largest:
        raise ConnectionError(f"a message has {size} bytes")
    text = bytearray(size)
    fill(source, memoryview(text), deadline)
    try:
        document, count = read_json(bytes(text))
    except (ValueError, TypeError):  # TypeError: not a list
        raise ConnectionError("a message cannot be read") from None
    if not isinstance(document, dict) or not isinstance(count, int) or count > _MOST_KEYS:
        raise ConnectionError("a message is not of the form that is sent")
    keys = [_native.Secret.zeros(KEY_BYTES) for _ in range(count)]
    for key in keys:
        fill(source, memoryview(key), deadline)
    return document, keys


def answer_of(carry_out: Callable[[], Any]) -> dict[str, Any]:
    """Carries out an order. Returns its result, or its error, as JSON for another process."""
    try:
        return {"result": carry_out()}
    except SealringError as problem:
        return {"error": problem.code, "message": str(problem)}
    except OSError as problem:
        return {"errno": problem.errno, "message": problem.strerror or str(problem)}


def result_of(answer: dict[str, Any]) -> Any:
    """Returns an answer's result, or raises the error that it names. Its sender is not trusted."""
    if "result" in answer:
        return answer["result"]
    message = shown(str(answer.get("message")), _LONGEST_REASON)
    if isinstance(number := answer.get("errno"), int):
        raise OSError(number, message)
    raise error_with(str(answer.get("error")), message) or WorkerFailed(message)


def _without_secrets() -> dict[str, str]:
    """The environment without SEALRING_ variables: they may hold secrets or name key files."""
    allowed = ALLOW_DEBUGGERS.read(os.environ)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    return kept | (with_settings({}, allow_debuggers=True) if allowed else {})


class Child:
    """A child process that runs a module of this package and carries out orders one by one."""

    def __init__(self, module: str) -> None:
        shut_out_debuggers()
        door = Door()
        # -P: Python imports no module from the working directory.
        command = [sys.executable, "-P", "-m", module, door.address]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_without_secrets())
        try:
            self.connection = door.accept(
                lambda pid: pid == self._process.pid, self._process.poll, START_SECONDS
            )
        except OSError as problem:
            self._end()
            raise WorkerFailed(f"a process of {module} did not start: {problem}") from problem
        except BaseException:
            self._end()
            raise
        finally:
            door.close()
        self.connection.settimeout(None)

    def ask(
        self,
        order: dict[str, Any],
        keys: Sequence[_native.Secret],
        progress: Progress = lambda count: None,
        files: Sequence[int] = (),
        seconds: float = math.inf,
    ) -> Any:
        """Sends an order and returns the child's result, or raises the error that it names.

        Raises WorkerFailed if the child does not answer in time.
        """
        deadline = time.monotonic() + seconds
        try:
            send(self.connection, order, keys, files)
            while True:
                answer, _ = receive(self.connection, _LARGEST_ANSWER, deadline)
                if not isinstance(done := answer.get("progress"), int):
                    break
                progress(done)
        except OSError as problem:
            status = self._process.poll()
            ended = "" if status is None else f", and ended with status {status}"
            raise WorkerFailed(
                f"the process that works on {order.get('part', 'a part')} did not answer: "
                f"{problem}{ended}. Run the same command again"
            ) from problem
        return result_of(answer)

    def close(self) -> None:
        """Closes the connection, and kills the child if it does not end within END_SECONDS."""
        self.connection.close()
        self._end()

    def _end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()


def serve(
    address: str,
    carry_out: Callable[[dict[str, Any], list[_native.Secret], list[int], Progress], Any],
) -> None:
    """Runs in the child: carries out orders until the parent closes the connection or ends."""
    with connect_to_parent(address) as parent:
        parent.settimeout(None)
        advance = partial(_tell_progress, parent)
        while True:
            head, files, _, _ = socket.recv_fds(parent, 4, _MOST_FILES)
            try:
                fill(parent, memoryview(rest := bytearray(4 - len(head))))
                order, keys = _received(parent, head + rest, _LARGEST_ORDER)
            except ConnectionError:
                return
            send(parent, answer_of(partial(carry_out, order, keys, files, advance)))
            for file in files:
                os.close(file)


def _tell_progress(parent: socket.socket, count: int) -> None:
    send(parent, {"progress": count})
