"""How the launchers of several machines meet: a fixed number of machines, each with a number.

With torch's own ways a mistake shows as a timeout after ten minutes, and machines are numbered by
the order of their names. Here every launcher writes who it is, reads what the others wrote, says
within a second whom it waits for, and reports a contradiction on every machine.

These texts are not trusted; they only help to find mistakes. For everything else, launchers with a
job secret use a store that is sealed under it.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from sealring.core.links.rendezvous import StoreCalls
from sealring.errors import (
    ConfigurationError,
    DuplicateRank,
    HandshakeError,
    MalformedSetup,
    PeerIncompatible,
    PeerNotAdmitted,
    PeerUnreachable,
    WrongPeer,
)
from sealring.formats.strict import read_json

_LOG = logging.getLogger("sealring")

_POLL_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
"""How long the first machine's store may take to answer a connection."""
_ALIKE: Final = "Start `sealring run` on every machine with the same --rdzv-endpoint and --nnodes"
_MOST_BYTES: Final = 4096
"""The most bytes that a launcher may write about itself."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """What one launcher tells the others."""

    machine: int
    machines: int
    host: str
    job: str
    fingerprint: str
    """The fingerprint of the job secret; "" without a secret."""
    instance: str
    """A random value, which distinguishes two launchers with the same number."""

    def contradiction(self, other: Launcher) -> HandshakeError | None:
        who = f"machine {other.machine} ({other.host})"
        if other.machines != self.machines:
            return PeerIncompatible(
                f"{who} was started with --nnodes {other.machines}, machine {self.machine} "
                f"({self.host}) with --nnodes {self.machines}",
                code="handshake.wrong_world_size",
            )
        if other.job != self.job:
            return WrongPeer(
                f"{who} was started for job {other.job!r}, machine {self.machine} ({self.host}) "
                f"for job {self.job!r}",
                code="handshake.wrong_job",
            )
        if other.fingerprint != self.fingerprint:
            return PeerNotAdmitted(
                f"{who} has another job secret: its fingerprint is "
                f"{other.fingerprint or 'missing'}, and that of machine {self.machine} "
                f"({self.host}) is {self.fingerprint or 'missing'}. Copy one secret file to all "
                "machines",
                code="handshake.unknown_authority",
            )
        if other.machine == self.machine and other.instance != self.instance:
            return DuplicateRank(
                f"two launchers were started with --node-rank {self.machine}, on {self.host} and "
                f"on {other.host}, or an earlier run is still alive"
            )
        return None


def parse_launcher(text: bytes) -> Launcher:
    """Parses what a launcher, or an attacker, wrote; raises MalformedSetup."""
    try:
        fields = read_json(text, _MOST_BYTES)
        one = Launcher(**fields)
        numbers, texts = (one.machine, one.machines), (one.host, one.job, one.fingerprint)
        if any(type(number) is not int for number in numbers):
            raise ValueError("a number is not one")
        if any(type(each) is not str or not each.isprintable() for each in (*texts, one.instance)):
            raise ValueError("a text is not printable")
    except (ValueError, TypeError) as problem:
        raise MalformedSetup(
            f"what a launcher wrote about itself cannot be read ({problem}): something else than "
            "`sealring run` uses the port, or the machines run different versions"
        ) from None
    return one


class Meeting(RendezvousHandler):
    """The rendezvous of `sealring run`. torch's launcher calls it at every start of its workers."""

    def __init__(
        self,
        host: str,
        port: int,
        machine: int,
        machines: int,
        *,
        job: str,
        fingerprint: str,
        sealed: Callable[[Store, int], Store],
        timeout: float,
    ) -> None:
        self._host, self._port = host, port
        self._job = job
        self._sealed = sealed
        self._timeout = timeout
        self._own = Launcher(
            machine, machines, socket.gethostname(), job, fingerprint, secrets.token_hex(8)
        )
        self.tcp: TCPStore | None = None
        self._round = 0
        self._kept: list[Any] = []
        """Stores to keep alive, because torch's C++ does not keep a Python store alive."""

    # ---- torch's interface

    def get_backend(self) -> str:
        return "sealring"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._timeout
        if self.tcp is None:
            if self._own.machine == 0:
                self._serve()
            self.tcp = self._connect(deadline)
        self._meet(self.tcp, deadline)
        store = self._sealed(PrefixStore(f"sealring/{self._round}", self.tcp), self._round)
        self._kept.append(store)
        self._round += 1
        address = RendezvousStoreInfo(self._host, self.tcp.port)
        return RendezvousInfo(store, self._own.machine, self._own.machines, address)

    # ---- the meeting

    def _serve(self) -> None:
        """Starts the store. It listens on all addresses, whatever the endpoint's host is."""
        try:
            # 127.0.0.1: its own client would try another host for minutes, despite Ctrl-C.
            server = TCPStore(
                "127.0.0.1", self._port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except DistError as problem:
            raise ConfigurationError(
                f"the first machine cannot listen on {self._host}:{self._port}: another program, "
                "or an earlier run, has the port. Choose another --rdzv-endpoint "
                f"({str(problem).splitlines()[0]})"
            ) from None
        self._kept.append(server)
        self._port = server.port

    def _connect(self, deadline: float) -> TCPStore:
        """Connects to the store by the endpoint. The first machine does so, too, to check it."""
        waiting = _Waiting(
            f"machine 0 at {self._host}:{self._port}", deadline, self._timeout, _ALIKE
        )
        if self._own.machine == 0:
            waiting = _Waiting(
                f"an answer of this machine's own store at {self._host}:{self._port}",
                deadline,
                self._timeout,
                "Pass --rdzv-endpoint with a name or an address of machine 0 that all machines "
                "reach, and --node-rank on every machine: without it, this is machine 0",
            )
        while True:
            try:
                with socket.create_connection((self._host, self._port), _ANSWER_SECONDS):
                    pass
            except OSError as problem:
                waiting.go_on(f"{problem.strerror or problem}")
                continue
            if (store := self._answering()) is not None:
                return store
            waiting.go_on("the connection was closed at once")

    def _answering(self) -> TCPStore | None:
        """Makes torch's client in a separate thread, as it waits for the first answer for ever."""
        answers: queue.SimpleQueue[TCPStore | None] = queue.SimpleQueue()

        def connect() -> None:
            try:
                store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)
            except DistError:
                answers.put(None)
            else:
                answers.put(store)

        threading.Thread(target=connect, name="sealring-meeting", daemon=True).start()
        try:
            return answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise PeerUnreachable(
                f"something listens at {self._host}:{self._port}, and does not answer as the "
                "launcher of machine 0 does: another program has the port. Choose another "
                "--rdzv-endpoint"
            ) from None

    def _meet(self, store: TCPStore, deadline: float) -> None:
        """Returns when all launchers have written who they are, without a contradiction."""
        own, prefix = self._own, f"sealring/launchers/{self._round}"
        text = json.dumps(asdict(own))
        problem = f"{prefix}/problem"
        known: dict[int, Launcher] = {}
        waiting = _Waiting("the other machines", deadline, self._timeout, _ALIKE)
        calls = StoreCalls(deadline)

        def read(key: str) -> bytes | None:
            return calls.make(lambda: store.get(key) if store.check([key]) else None)

        def put(key: str, value: str) -> bytes:
            return calls.make(lambda: store.compare_set(key, "", value))

        def refuse(error: HandshakeError) -> NoReturn:
            put(problem, json.dumps([error.code, str(error)]))
            raise error

        try:
            first = put(f"{prefix}/{own.machine}", text)
            if (error := own.contradiction(parse_launcher(first))) is not None:
                refuse(error)
            while len(known) < own.machines:
                if (told := read(problem)) is not None:
                    raise _told(told)
                for machine in set(range(own.machines)) - known.keys():
                    if (wrote := read(f"{prefix}/{machine}")) is not None:
                        known[machine] = parse_launcher(wrote)
                        if (error := own.contradiction(known[machine])) is not None:
                            refuse(error)
                if missing := sorted(set(range(own.machines)) - known.keys()):
                    came = ", ".join(f"{one.machine} ({one.host})" for one in known.values())
                    numbers = ", ".join(map(str, missing))
                    waiting.go_on(f"came: {came}; not yet: {numbers}")
        except (DistError, TimeoutError) as lost:
            raise PeerUnreachable(
                f"the store of machine 0 at {self._host}:{self._port} was lost while the machines "
                f"met: {str(lost).splitlines()[0]}"
            ) from None


_CONTRADICTIONS: Final[dict[str, type[HandshakeError]]] = {
    "handshake.duplicate_rank": DuplicateRank,
    "handshake.unknown_authority": PeerNotAdmitted,
    "handshake.wrong_job": WrongPeer,
    "handshake.wrong_world_size": PeerIncompatible,
}


def _told(text: bytes) -> HandshakeError:
    """The error for a contradiction that another launcher has written into the store."""
    try:
        code, message = read_json(text, _MOST_BYTES)
        clean = "".join(each if each.isprintable() else "?" for each in str(message))
        return _CONTRADICTIONS[code](clean, code=code)
    except (ValueError, TypeError, KeyError):
        return MalformedSetup("another launcher reported a problem that cannot be read")


class _Waiting:
    """Logs whom this launcher waits for: after a second, and then less and less often."""

    def __init__(self, whom: str, deadline: float, seconds: float, advice: str) -> None:
        self._whom = whom
        self._advice = advice
        self._deadline = deadline
        self._seconds = seconds
        self._said = ""
        self._start = time.monotonic()
        self._next = 1.0

    def go_on(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            raise PeerUnreachable(
                f"{self._whom} did not come within {self._seconds:.0f} s ({why}). {self._advice}"
            )
        if now - self._start >= self._next or (self._said and why != self._said):
            _LOG.warning("sealring: waiting for %s: %s", self._whom, why)
            self._said = why
            self._next = max(self._next * 4, now - self._start + 1.0)
        time.sleep(_POLL_SECONDS)
