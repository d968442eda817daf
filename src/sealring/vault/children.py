"""How a child process of this one gets keys: through a connection that it opens itself.

Another process of this user could take over what a new process inherits. So the child inherits no
descriptor: it shuts such processes out of its memory first, then connects to an address that is no
secret, and the kernel says to each end which process the other is. The child answers a question
besides: who connected may have ended, and left its connection and its number to others.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from sealring import _native
from sealring.core.identity.process import CREDENTIALS, peer_of, shut_out_debuggers
from sealring.core.settings import ALLOW_DEBUGGERS, with_settings
from sealring.errors import SealringError, WorkerFailed, error_with
from sealring.formats.strict import read_json
from sealring.vault.keys import KEY_BYTES

START_SECONDS: Final = 120.0
"""For a child to start, on a machine that is busy."""
_END_SECONDS: Final = 5.0
_LARGEST_MESSAGE: Final = 64 << 20
_MOST_KEYS: Final = 8
_QUESTION_BYTES: Final = 16
SHORTEST_WAIT: Final = 0.001
"""Seconds. A socket that waits for none at all fails otherwise than one whose time has passed."""
Progress = Callable[[int], None]


class Door:
    """An address that this process listens at, for one child."""

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
        """The child's connection; those of other processes are closed.

        `ended` gives the child's status once it has ended.
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
    """Whether the process that connected answers, and not another that it left the connection to.

    When it has ended, a new child may get its number. The kernel adds the sender's to each message.
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
    """The child's end, once no other process of this user can read its memory."""
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
    """The process that traces this one; 0 if there is none."""
    return _status_of("self", "TracerPid:")


def is_child(pid: int) -> bool:
    try:
        return _status_of(str(pid), "PPid:") == os.getpid()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _status_of(process: str, name: str) -> int:
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def fill(source: socket.socket, room: memoryview) -> None:
    while room:
        count = source.recv_into(room)
        if count == 0:
            raise ConnectionError("the process at the other end is gone")
        room = room[count:]


def send(to: socket.socket, document: Any, keys: Sequence[_native.Secret] = ()) -> None:
    """JSON, and keys of 32 bytes behind it, which are in no other memory of this process."""
    text = json.dumps([document, len(keys)]).encode()
    to.sendall(len(text).to_bytes(4, "big") + text)
    for key in keys:
        assert len(key) == KEY_BYTES
        to.sendall(memoryview(key))


def receive(source: socket.socket) -> tuple[Any, list[_native.Secret]]:
    head = bytearray(4)
    fill(source, memoryview(head))
    size = int.from_bytes(head, "big")
    if size > _LARGEST_MESSAGE:
        raise ConnectionError(f"a message has {size} bytes")
    text = bytearray(size)
    fill(source, memoryview(text))
    try:
        document, count = read_json(bytes(text))
    except (ValueError, TypeError):  # TypeError: it is no list
        raise ConnectionError("a message cannot be read") from None
    if not isinstance(document, dict) or not isinstance(count, int) or count > _MOST_KEYS:
        raise ConnectionError("a message is not of the form that is sent")
    keys = [_native.Secret.zeros(KEY_BYTES) for _ in range(count)]
    for key in keys:
        fill(source, memoryview(key))
    return document, keys


def _without_secrets() -> dict[str, str]:
    """The environment may hold the job's secret, and names files that hold keys."""
    allowed = ALLOW_DEBUGGERS.read(os.environ)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    return kept | (with_settings({}, allow_debuggers=True) if allowed else {})


class Child:
    """A process of this package that carries out orders, one after the other."""

    def __init__(self, module: str) -> None:
        shut_out_debuggers()
        door = Door()
        # -P: no module is taken from the working directory.
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
        self, order: Any, keys: Sequence[_native.Secret], progress: Callable[[int], None]
    ) -> Any:
        """What the child answers. An error that it names is raised here."""
        try:
            send(self.connection, order, keys)
            while True:
                answer, _ = receive(self.connection)
                if not isinstance(done := answer.get("progress"), int):
                    break
                progress(done)
        except OSError as problem:
            status = self._process.poll()
            raise WorkerFailed(
                f"a process that was to work on {order.get('part', 'a part')} ended with status "
                f"{status}: {problem}. Run the same command again: it goes on from here"
            ) from problem
        if "result" in answer:
            return answer["result"]
        message = str(answer.get("message"))
        raise error_with(str(answer.get("error")), message) or WorkerFailed(message)

    def close(self) -> None:
        """Ends the process: at once if it still works."""
        self.connection.close()
        self._end()

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()


def serve(
    address: str, carry_out: Callable[[Any, list[_native.Secret], Callable[[int], None]], Any]
) -> None:
    """The child's side: carries out orders until the parent closes the connection, or ends."""
    with connect_to_parent(address) as parent:
        parent.settimeout(None)
        while True:
            try:
                order, keys = receive(parent)
            except ConnectionError:
                return
            try:
                made = carry_out(order, keys, lambda count: send(parent, {"progress": count}))
                answer = {"result": made}
            except (SealringError, OSError) as problem:
                answer = {"error": getattr(problem, "code", ""), "message": str(problem)}
            send(parent, answer)
