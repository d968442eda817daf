"""An HTTP server that serves a directory, with ranges, or answers as a test says."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """In the directory's place."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    lost: bool = False
    """The connection is closed without an answer."""
    endless: bool = False
    slowly: float = 0.0
    """Seconds for each byte of the body."""


class HttpStore(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, directory: Path, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.answer: Callable[[str, str], Answer | None] = lambda method, path: None
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        """Method, path, headers and body."""
        self.ended = threading.Event()
        self.scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, *_: object) -> None:
        """Clients close connections in the middle of an answer."""

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpStore

    def __init__(self, request: Any, address: Any, server: HttpStore) -> None:
        super().__init__(request, address, server, directory=str(server.directory))

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        given = self.server.answer(self.command, self.path)
        if given is None:
            self._send_file()
        elif given.lost:
            self.close_connection = True
        else:
            self._send(given)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, given: Answer) -> None:
        self.send_response(given.status)
        for name, value in given.headers.items():
            self.send_header(name, value)
        if given.endless:
            self.close_connection = True
        elif "Content-Length" not in given.headers:
            self.send_header("Content-Length", str(len(given.body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            while given.endless and self.command != "HEAD" and not self.server.ended.is_set():
                self.connection.sendall(given.body)
            if self.command == "HEAD":
                return
            for at in range(len(given.body)) if given.slowly else ():
                self.connection.sendall(given.body[at : at + 1])
                if self.server.ended.wait(given.slowly):
                    break
            if not given.slowly:
                self.connection.sendall(given.body)

    def _send_file(self) -> None:
        where = Path(self.translate_path(self.path))
        wanted = self.headers.get("Range")
        if wanted is None or not where.is_file():
            super().do_HEAD() if self.command == "HEAD" else super().do_GET()
            return
        content = where.read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = min(int(last or len(content)), len(content) - 1)
        piece = content[int(first) : end + 1]
        self._send(Answer(206, piece, {"Content-Range": f"bytes {first}-{end}/{len(content)}"}))


@contextlib.contextmanager
def serving(directory: Path, tls: ssl.SSLContext | None = None) -> Iterator[HttpStore]:
    server = HttpStore(directory, tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
