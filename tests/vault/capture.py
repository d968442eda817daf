"""What passes the loopback device of this process's network namespace."""

from __future__ import annotations

import socket
import struct
import threading

ALL_PROTOCOLS = 3
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_STATISTICS = 263, 6


class Capture:
    """Frames, from `start` to `stop`. A frame that was lost is an error."""

    def __init__(self) -> None:
        self.frames = bytearray()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._last = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="capture")
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                self.frames += self._socket.recv(1 << 17)
            except TimeoutError:
                if self._last.is_set():
                    return

    def stop(self) -> bytearray:
        self._last.set()
        self._thread.join()
        _, lost = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._socket.close()
        if lost:
            raise RuntimeError(f"{lost} frames were not captured")
        return self.frames


def send_over_loopback(content: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here:
            there, _ = server.accept()
            here.sendall(content)
        with there:
            while there.recv(1 << 16):
                pass
