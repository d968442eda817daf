"""The process that seals one part: python -P -m sealring.vault.sealing_process ADDRESS.

It starts with nothing secret, and shuts other processes of its user out of its memory before it
connects. Through that connection it gets its orders, the part's key and two files, once: the staged
plaintext and the file to write. It answers with the commitment and ends.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from typing import Final

from sealring import _native
from sealring.identity.peer_process import peer_of
from sealring.identity.process import allows_debuggers, shut_out_debuggers
from sealring.vault.keys import KEY_BYTES

_SECONDS: Final = 120.0


def tracer() -> int:
    """The process that traces this one; 0 if there is none."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("TracerPid:"))


def main() -> None:
    shut_out_debuggers()
    if not allows_debuggers(os.environ) and tracer() != 0:
        raise SystemExit("another process traced this one before it could shut debuggers out")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as parent:
        parent.settimeout(_SECONDS)
        parent.connect(b"\0" + sys.argv[1].encode())
        if peer_of(parent).pid != os.getppid():
            raise SystemExit("the address is not that of the process that started this one")
        head, files, _, _ = socket.recv_fds(parent, 4, 2)
        order = json.loads(_exactly(parent, int.from_bytes(head, "big")))
        key = _native.Secret.zeros(KEY_BYTES)
        _fill(parent, memoryview(key))
        memory, target = files
        try:
            answer = {"commitment": _sealed(order, key, memory, target)}
        except OSError as problem:
            answer = {"error": str(problem)}
        parent.sendall(json.dumps(answer).encode())


def _sealed(order: dict[str, object], key: _native.Secret, memory: int, target: int) -> str:
    size = order["bytes"]
    assert isinstance(size, int)
    writer = _native.SealedFileWriter(
        target, key, str(order["suite"]), bytes.fromhex(str(order["context"])), str(order["part"])
    )
    if size:
        with mmap.mmap(memory, size, prot=mmap.PROT_READ) as staged, memoryview(staged) as plain:
            writer.write([plain])
    writer.finish()
    os.fsync(target)
    return writer.commitment.hex()


def _exactly(source: socket.socket, size: int) -> bytearray:
    room = bytearray(size)
    _fill(source, memoryview(room))
    return room


def _fill(source: socket.socket, room: memoryview) -> None:
    while room:
        count = source.recv_into(room)
        if count == 0:
            raise ConnectionError("the process that gave the order is gone")
        room = room[count:]


if __name__ == "__main__":
    main()
