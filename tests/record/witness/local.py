"""Witnesses for tests: in a thread, in a process of their own, and dishonest ones."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sealring.formats.http import ServerLimits
from sealring.formats.log.checkpoints import parse_submission
from sealring.formats.log.notes import SignatureKind, Signer, parse_note
from sealring.formats.log.policy import Log, LogPolicy, Witness, byzantine_policy
from sealring.record.statements.signing import write_signer
from sealring.record.witness import LIMITS, WitnessState, serving
from tests.ports import free_port

SEALRING = Path(sys.executable).parent / "sealring"


def witness_key(number: int = 1) -> Signer:
    return Signer.generate(f"witness.example/{number}", SignatureKind.COSIGNATURE)


@contextmanager
def answering(state: WitnessState, limits: ServerLimits = LIMITS, port: int = 0) -> Iterator[int]:
    """Run a real server in a thread of this process. Yields its port."""
    loop = asyncio.new_event_loop()
    started: list[int] = []
    ready, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with serving(state, "127.0.0.1", port, limits) as found:
            started.append(found)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(30)
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def request(
    port: int, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read(), response.headers["content-type"]
    finally:
        connection.close()


@dataclass
class LocalWitness(ABC):
    folder: Path
    number: int
    log: LogPolicy
    signer: Signer = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.signer = witness_key(self.number)
        self.port = free_port()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def wait_until_it_answers(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    @property
    def listed(self) -> Witness:
        url = f"http://127.0.0.1:{self.port}"
        return Witness(f"w{self.number}", self.signer.verifier, url)


@dataclass
class WitnessProcess(LocalWitness):
    """The command `sealring audit witness`, run the way an operator runs it."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        key = self.folder / "witness.key"
        if not key.exists():
            write_signer(key, self.signer)
        (self.folder / "logs.policy").write_text(self.log.encode())
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    SEALRING, "audit", "witness", "--key", "witness.key", "--logs", "logs.policy",
                    "--state", "state", "--listen", f"127.0.0.1:{self.port}",
                ],
                cwd=self.folder,
                stderr=output,
            )  # fmt: skip

    def wait_until_it_answers(self) -> None:
        assert self.process is not None
        until = time.monotonic() + 100
        while b"answers at" not in (self.folder / "output").read_bytes():
            assert self.process.poll() is None, (self.folder / "output").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@dataclass
class WitnessThread(LocalWitness):
    """The same server and state in a thread of this process, which starts faster."""

    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        state = WitnessState(self.folder / "state", self.signer, self.log)
        self.stack.enter_context(answering(self.stack.enter_context(state), port=self.port))

    def wait_until_it_answers(self) -> None:
        pass

    def kill(self) -> None:
        self.stack.close()


@contextmanager
def liar(port: int, answer: Callable[[str, str, bytes], tuple[int, bytes]]) -> Iterator[None]:
    """Run a server in a witness's place that gives the test's answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            status, body = answer(self.command, self.path, self.rfile.read(length))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None:
            pass  # the client cuts the answer off, as it should

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def signs_anything(signer: Signer) -> Callable[[str, str, bytes], tuple[int, bytes]]:
    """Return the answers of a corrupt witness, which cosigns everything and remembers nothing."""

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            return 404, b""
        note = parse_note(parse_submission(body).checkpoint)
        return 200, signer.sign(note.text, int(time.time())).encode().encode()

    return answer


def policy_of(log: Signer, witnesses: list[Witness]) -> LogPolicy:
    return byzantine_policy([Log(log.verifier)], witnesses)
