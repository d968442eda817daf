"""A helper that was taken over: python -m tests.attacks.false_helper KIND ADDRESS."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from sealring.vault.children import connect_to_parent, fill, receive
from sealring.vault.keys import KEY_BYTES

ANSWERS = {
    "no json": b"\xff\xfe{",
    "a number": b"7",
    "no commitment": b"{}",
    "nested": b"[" * 100_000,
    "a commitment that is none": json.dumps({"commitment": "../x"}).encode(),
    "terminal codes": json.dumps({"error": "\x1b[2J" + "A" * 2000}).encode(),
}


MESSAGES = {
    "no json": b"\xff\xfe{",
    "a number": b"7",
    "a list of one": b"[{}]",
    "no document": b"[7, 0]",
    "nested": b"[" * 100_000,
    "many keys": b"[{}, 1000000000]",
    "no error": b'[{"error": "annotations", "message": "x"}, 0]',
    "an error that is none": b'[{"error": [], "message": {}}, 0]',
    "nothing": b"[{}, 0]",
    "no progress": b'[{"progress": "x"}, 0]',
}
"""In place of what a process that seals shards answers to an order."""


def main(kind: str, address: str) -> None:
    parent = connect_to_parent(address)
    if kind.startswith("message: "):
        receive(parent)
        text = MESSAGES.get(kind.removeprefix("message: "), b"")
        parent.sendall((len(text) or 0xFFFFFFFF).to_bytes(4, "big") + text)
        parent.recv(1)
        return
    head = socket.recv_fds(parent, 4, 2)[0]
    fill(parent, memoryview(bytearray(int.from_bytes(head, "big") + KEY_BYTES)))
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind in ANSWERS:
        parent.sendall(ANSWERS[kind])
        return
    while True:
        parent.sendall(b" " * (1 if kind == "a byte at a time" else 1 << 20))
        if kind == "a byte at a time":
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
