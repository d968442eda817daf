"""The process that seals one part: python -m sealring.vault.helper SOCKET.

It gets its orders, the part's key and two files through the socket, once: the staged plaintext and
the file to write. It answers with the commitment and ends.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys

from sealring import _native
from sealring.identity.process import shut_out_debuggers
from sealring.vault.keys import KEY_BYTES


def main() -> None:
    shut_out_debuggers()
    with socket.socket(fileno=int(sys.argv[1])) as parent:
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
