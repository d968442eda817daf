"""An S3 server that loses answers, answers with errors, or says nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from sealring.errors import StoreFailed
from sealring.vault import Vault, keys, requests
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
Fault = Callable[[str, str], str | None]
Answer = Callable[[str, str], tuple[int, bytes] | None]
"""In the server's place: a status and a body."""

_STATUS = {"refused": 403, "missing": 404, "failed condition": 412}


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, but for those that `fault` names."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind = urlsplit(server).netloc
        self.fault: Fault = lambda method, path: None
        self.answer: Answer = lambda method, path: None
        self.rewrite: Callable[[str], str] = lambda path: path
        self.ended = threading.Event()
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        if fault == "silent":
            self.server.ended.wait()
            return
        if fault == "endless":
            self._send_without_end()
            return
        given = self.server.answer(self.command, self.path)
        if fault in _STATUS:
            given = _STATUS[fault], b""
        if given is not None:
            self.send_response(given[0])
            self.send_header("Content-Length", str(len(given[1])))
            self.end_headers()
            self.wfile.write(given[1] if self.command != "HEAD" else b"")
            return
        connection = http.client.HTTPConnection(self.server.behind)
        path = self.server.rewrite(self.path)
        connection.request(self.command, path, content, dict(self.headers))
        answer = connection.getresponse()
        came = answer.read()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response(answer.status)
        own = {"transfer-encoding", "connection", "content-length", "date", "server"}
        for name, value in answer.getheaders():
            if name.lower() not in own:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(came))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "cut":
            self.close_connection = True
            came = came[: len(came) // 2]
        if self.command != "HEAD":
            self.wfile.write(came)

    def _send_without_end(self) -> None:
        """Until the client closes the connection."""
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.ended.is_set():
                self.server.sent += self.connection.send(bytes(1 << 16))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(os.environ["AWS_ENDPOINT_URL"])
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.address)
    files = fsspec.get_filesystem_class("s3")
    files.clear_instance_cache()  # they know the other address
    try:
        yield made
    finally:
        made.ended.set()
        made.shutdown()
        thread.join()
        made.server_close()
        files.clear_instance_cache()


@pytest.fixture
def stored(
    proxy: Proxy, s3: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Vault:
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    return Vault.create(f"{s3}/{tmp_path.name}", keys.key_file(key), "owner")


def once(fault: str, method: str, path: str) -> Fault:
    left = [fault]

    def chosen(came: str, where: str) -> str | None:
        return left.pop() if left and came == method and re.search(path, where) else None

    return chosen


@pytest.mark.parametrize(
    "path", ["/taken$", "/key.json$", "/rank-00000$", "/rank-00000.digests$", "/manifest$"]
)
@pytest.mark.threat("V27")
def test_a_put_whose_answer_is_lost(path: str, stored: Vault, proxy: Proxy) -> None:
    """The client repeats it, and finds what it has put itself."""
    save(stored, 1)
    proxy.fault = once("lost", "PUT", path)
    save(stored, 2)
    assert same(load(stored), state(2))
    assert stored.find("run").manifest.object_version == 2


@pytest.mark.parametrize("path", ["/key.json$", "/manifest$", "/rank-00000$", "list-type"])
@pytest.mark.threat("V27")
def test_a_body_that_is_cut_is_asked_for_again(path: str, stored: Vault, proxy: Proxy) -> None:
    save(stored, 1)
    proxy.fault = once("cut", "GET", path)
    assert same(load(stored), state(1))


@pytest.mark.parametrize("path", ["/taken$", "/key.json$", "/rank-00000$", "/manifest$"])
@pytest.mark.threat("V27")
def test_a_put_that_is_refused(path: str, stored: Vault, proxy: Proxy) -> None:
    save(stored, 1)
    proxy.fault = once("refused", "PUT", path)
    refused(lambda: save(stored, 2), StoreFailed, "cannot be used")
    assert same(load(stored), state(1))
    save(stored, 3)
    assert same(load(stored), state(3))


@pytest.mark.parametrize(
    ("action", "method", "path"),
    [
        (load, "HEAD", "/vault.json$"),
        (load, "GET", "list-type"),
        (load, "GET", "/rank-00000$"),
        (save, "PUT", "/taken$"),
        (save, "PUT", "/rank-00000$"),
        (save, "PUT", "/manifest$"),
    ],
)
@pytest.mark.threat("V27")
def test_a_server_that_says_nothing(
    action: Callable[[Vault], object], method: str, path: str,
    stored: Vault, proxy: Proxy, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The client alone would wait for more than six minutes."""
    save(stored, 1)
    monkeypatch.setattr(requests, "SILENT_SECONDS", 1.0)

    def silent(came: str, where: str) -> str | None:
        return "silent" if came == method and re.search(path, where) else None

    proxy.fault = silent
    refused(lambda: action(stored), StoreFailed, "did not answer within 1 seconds")
