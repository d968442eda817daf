"""A hostile helper process: python -m tests.attacks.false_helper KIND ADDRESS."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from sealring.vault.children import connect_to_parent, receive

ANSWERS = {
    "no json": b"\xff\xfe{",
    "a number": b"7",
    "a list of one": b"[{}]",
    "no document": b"[7, 0]",
    "nested": b"[" * 100_000,
    "many keys": b"[{}, 1000000000]",
    "no error": b'[{"error": "annotations", "message": "x"}, 0]',
    "an error that is none": b'[{"error": [], "message": {}}, 0]',
    "a number that is none": b'[{"errno": "x", "message": {}}, 0]',
    "nothing": b"[{}, 0]",
    "no progress": b'[{"progress": "x"}, 0]',
    "no commitment": b'[{"result": {}}, 0]',
    "a commitment that is none": b'[{"result": "../x"}, 0]',
    "terminal codes": json.dumps([{"message": "\x1b[2J" + "A" * 2000}, 0]).encode(),
}
"""What the false helper answers to an order, instead of a helper's real answer."""


def main(kind: str, address: str) -> None:
    parent = connect_to_parent(address)
    receive(parent)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "four gigabytes":
        parent.sendall(b"\xff" * 4)
        parent.recv(1)
    if kind in ANSWERS:
        parent.sendall(len(ANSWERS[kind]).to_bytes(4, "big") + ANSWERS[kind])
        parent.recv(1)
        return
    parent.sendall((1 << 19).to_bytes(4, "big"))
    while True:
        parent.sendall(b" ")
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
