"""Asks the witnesses of a policy for cosignatures, and so whether they have seen a newer log.

Witnesses may lie, or answer slowly or without end. Only a signature that verifies counts. But no
witness can invent a checkpoint that the log's own key signed. If one shows such a checkpoint and it
contradicts the log, the log was cut or rewritten, whatever the other witnesses say.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from sealring.errors import (
    ConfigurationError,
    ForkedLog,
    LogError,
    NotALog,
    TamperedLog,
)
from sealring.formats.log.checkpoints import (
    PATH,
    Checkpoint,
    SignedCheckpoint,
    Submission,
    open_checkpoint,
    parse_number,
    seen_path,
)
from sealring.formats.log.notes import MAX_NOTE_BYTES, SignatureLine, parse_signatures
from sealring.formats.log.policy import NONE, LogPolicy, Witness

ANSWER_SECONDS: Final = 10.0
CLOCK_SKEW_SECONDS: Final = 300.0
"""How far a witness's clock may be behind."""
_OF_THE_LOG: Final = (ForkedLog, NotALog, TamperedLog)
"""Faults of the log itself. A witness without the log's key cannot cause them."""
_FAULT: Final = "log.witness_fault"
_ATTEMPTS: Final = 3
"""Tries per witness. Each tells the witness's size, but another process may cosign in between."""

Prove: TypeAlias = Callable[[int], tuple[bytes, list[bytes]]]
"""Gives the root of the first N entries of the log, and the proof from it to the checkpoint."""


@dataclass(slots=True)
class Answers:
    """The answer of each witness, by its name in the policy."""

    cosignatures: dict[str, SignatureLine] = field(default_factory=dict)
    faults: dict[str, LogError] = field(default_factory=dict)


def cosign(
    signed: SignedCheckpoint, prove: Prove, policy: LogPolicy, seconds: float = ANSWER_SECONDS
) -> Answers:
    """Asks the witnesses to cosign a checkpoint. ForkedLog if they saw another log."""
    alone = _one_at_a_time(prove)

    def ask(witness: Witness, until: float) -> SignatureLine:
        return _Asked(witness, policy, signed.checkpoint, alone, until).cosign(signed)

    return _ask_all(policy, ask, seconds)


def check_newest(
    signed: SignedCheckpoint, prove: Prove, policy: LogPolicy, seconds: float = ANSWER_SECONDS
) -> Answers:
    """Requires that a quorum of witnesses says now that they have seen nothing newer of this log.

    A cosignature says that as of its time. So an old answer, or one that the network made up, does
    not count. A quorum includes an honest witness of the last quorum, so a log that was cut or
    rewritten since then is noticed.
    """
    if policy.quorum == NONE:
        raise ConfigurationError("the policy asks for no quorum, so there are no witnesses to ask")
    since = int(time.time() - CLOCK_SKEW_SECONDS)
    answers = cosign(signed, prove, policy, seconds)
    fresh = []
    for witness in policy.witnesses:
        line = answers.cosignatures.get(witness.name)
        if line is None:
            continue
        if witness.verifier.check(signed.note.text, line) >= since:
            fresh.append(witness.verifier)
        else:
            answers.faults[witness.name] = _fault(
                f"the witness {witness.name} answered with an old cosignature: a replay, or its "
                "clock is wrong"
            )
    if not policy.is_quorum(fresh):
        raise LogError(
            f"too few witnesses say that this is the newest: {reasons(answers)}",
            code="log.no_quorum",
        )
    return answers


def reasons(answers: Answers) -> str:
    """The faults of the witnesses, for an error's message."""
    return "; ".join(str(fault) for _, fault in sorted(answers.faults.items())) or "none was asked"


def _fault(problem: str) -> LogError:
    return LogError(problem, code=_FAULT)


def _one_at_a_time(prove: Prove) -> Prove:
    lock = threading.Lock()

    def alone(old: int) -> tuple[bytes, list[bytes]]:
        with lock:
            return prove(old)

    return alone


def _ask_all(
    policy: LogPolicy, ask: Callable[[Witness, float], SignatureLine], seconds: float
) -> Answers:
    answers = Answers()
    until = time.monotonic() + seconds

    def run(witness: Witness) -> None:
        try:
            answers.cosignatures[witness.name] = ask(witness, until)
        except LogError as problem:
            kept = isinstance(problem, _OF_THE_LOG) or problem.code == _FAULT
            answers.faults[witness.name] = (
                problem
                if kept
                else _fault(f"the witness {witness.name} answers wrongly: {problem}")
            )
        except (OSError, http.client.HTTPException, ValueError) as problem:
            answers.faults[witness.name] = _fault(
                f"the witness {witness.name} cannot be asked: {problem or type(problem).__name__}"
            )

    # Daemon threads: a witness that answers without end must not keep the process alive.
    threads = [
        threading.Thread(target=run, args=(each,), name="sealring-witness", daemon=True)
        for each in policy.witnesses
        if each.url is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    # A copy, because an answer after the deadline must not change the result.
    found = Answers(dict(answers.cosignatures), dict(answers.faults))
    for witness in policy.witnesses:
        if witness.name not in (*found.cosignatures, *found.faults):
            why = "has no URL in the policy" if witness.url is None else "did not answer in time"
            found.faults[witness.name] = _fault(f"the witness {witness.name} {why}")
    for fault in found.faults.values():
        if isinstance(fault, _OF_THE_LOG):
            raise fault
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A conversation with one witness about one log."""

    witness: Witness
    policy: LogPolicy
    current: Checkpoint
    prove: Prove
    until: float

    def cosign(self, signed: SignedCheckpoint) -> SignatureLine:
        old = 0
        for _ in range(_ATTEMPTS):
            _, proof = self.prove(old)
            body = Submission(old, tuple(proof), signed.note.encode()).encode()
            status, answer = self._exchange("POST", PATH, body)
            if status == 200:
                return self._own_line(answer, signed.note.text)
            if status == 409:
                size = parse_number(
                    answer.decode("ascii", "replace").removesuffix("\n"),
                    f"the size that {self.witness.name} answers with",
                )
                if size > self.current.size:
                    raise self._contradicted(f"has seen {size} entries")
                old = size
            elif status == 422:
                raise self._contradicted("does not see this log continue what it has seen")
            else:
                raise self._fault(f"answered with status {status}")
        raise self._fault("says each time that it has seen another size")

    def _contradicted(self, claim: str) -> LogError:
        """Raises ForkedLog if the witness can show its claim. Else returns the witness's fault."""
        unshown = self._fault(f"says that it {claim}, and does not show it")
        status, answer = self._exchange("GET", seen_path(self.current.origin), b"")
        if status != 200:
            return unshown
        logs_alone = LogPolicy(self.policy.logs)
        seen = open_checkpoint(answer, logs_alone).checkpoint
        if seen.origin != self.current.origin:
            return unshown
        if seen.size > self.current.size:
            raise ForkedLog(
                f"the log {seen.origin} ends at {self.current.size} entries, and the witness "
                f"{self.witness.name} holds a checkpoint of {seen.size} that the log signed: its "
                "end was cut off, or an older copy was put in its place",
                code="log.truncated_log",
            )
        before, _ = self.prove(seen.size)
        if before != seen.root:
            raise ForkedLog(
                f"the witness {self.witness.name} holds a checkpoint of {seen.size} entries that "
                f"the log {seen.origin} signed, and the log has other entries now: it was "
                "rewritten, or shows each reader another view"
            )
        return unshown

    def _own_line(self, answer: bytes, text: str) -> SignatureLine:
        for line in parse_signatures(answer.decode("utf-8", "replace")):
            if self.witness.verifier.signed(line):
                self.witness.verifier.check(text, line)
                return line
        raise self._fault("answered without a cosignature of its key")

    def _fault(self, problem: str) -> LogError:
        return _fault(f"the witness {self.witness.name} {problem}")

    def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Makes one request on a connection of its own. It ends by the deadline."""
        url = urlsplit(self.witness.url or "")
        left = self.until - time.monotonic()
        if url.scheme not in ("http", "https") or not url.hostname or left <= 0:
            raise self._fault("did not answer in time" if left <= 0 else "has no http(s) URL")
        https = url.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=left)

        def cut_off() -> None:
            if (opened := connection.sock) is not None:
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(left, cut_off)
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, url.path.rstrip("/") + path, body or None)
            with connection.getresponse() as response:
                answer = response.read(MAX_NOTE_BYTES + 1)
        finally:
            timer.cancel()
            connection.close()
        if len(answer) > MAX_NOTE_BYTES:
            raise self._fault("answers without an end")
        return response.status, answer
