"""Everything that passes a network device, written to a file until the process ends.

python sniffer.py DEVICE FILE
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

ALL_PROTOCOLS = 3


def main() -> None:
    device, file = sys.argv[1:]
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as heard,
        Path(file).open("wb", buffering=0) as out,
    ):
        heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        heard.bind((device, 0))
        print("listening", flush=True)
        while True:
            out.write(heard.recv(1 << 17))


if __name__ == "__main__":
    main()
