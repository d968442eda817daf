"""A stand-in, on loopback, for a local service: a metadata service or a pod's agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, bytes], tuple[int, bytes]]


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, int]]:
    """Yields the address. `answer` takes the path with its query, and the body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            status, content = answer(self.path, self.rfile.read(size))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield ("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
