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

from sealring import _native
from sealring.formats.strict import read_json
from sealring.vault.children import connect_to_parent, fill
from sealring.vault.keys import KEY_BYTES


def main() -> None:
    try:
        parent = connect_to_parent(sys.argv[1])
    except ConnectionError as problem:
        raise SystemExit(str(problem)) from None
    with parent:
        head, files, _, _ = socket.recv_fds(parent, 4, 2)
        order = read_json(_exactly(parent, int.from_bytes(head, "big")))
        key = _native.Secret.zeros(KEY_BYTES)
        fill(parent, memoryview(key))
        memory, target = files
        answer: dict[str, object]
        try:
            answer = {"commitment": _sealed(order, key, memory, target)}
        except OSError as problem:
            answer = {"errno": problem.errno, "error": problem.strerror}
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
    fill(source, memoryview(room))
    return room


if __name__ == "__main__":
    main()
