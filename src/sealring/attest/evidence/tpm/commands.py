"""The few TPM 2.0 commands that a worker needs (library specification, part 3), in plain Python.

The kernel's /dev/tpmrm0 takes one command per write and gives one answer per read; swtpm does so
over a socket. Every created object is flushed again, because a TPM has room for only three keys.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from sealring.attest.evidence.encoding import Cursor, sized
from sealring.attest.evidence.tpm.structures import BANKS, NULL, PCRS, SHA256
from sealring.errors import TpmFailed

OWNER, NO_KEY, PASSWORD, ENDORSEMENT = 0x40000001, 0x40000007, 0x40000009, 0x4000000B
_NO_SESSIONS, _SESSIONS = 0x8001, 0x8002
_HEADER_BYTES: Final = 10
_MAX_ANSWER: Final = 4096
_NO_SUCH_HANDLE: Final = 0x18B
_NV_CHUNK: Final = 512
_PCRS_AT_ONCE: Final = 8
_SECONDS: Final = 60
# TCG EK Credential Profile: larger EKs have the policy "the endorsement hierarchy's password, or
# what an index of the TPM's memory says" (PolicyB). Its two branches are PolicyA and PolicyC.
EITHER_POLICY: Final = bytes.fromhex(
    "b26e7d28d11a50bc53d882bcf5fd3a1a074148bb35d3b4e4"
    "cb1c0ad9bde419cacb47ba09699646150f9fc000f3f80e12"
)
_BRANCHES: Final = (
    bytes.fromhex(
        "8bbf2266537c171cb56e403c4dc1d4b64f432611dc386e6f"
        "532050c3278c930e143e8bb1133824ccb431053871c6db53"
    ),
    bytes.fromhex(
        "d6032ce61f2fb3c240eb3cf6a33237ef2b6a16f4293c22b4"
        "55e261cffd217ad5b4947c2d73e63005eed2dc2b3593d165"
    ),
)


class Tpm:
    """One connection to a TPM. Not thread-safe."""

    def __init__(self, exchange: Callable[[bytes], bytes], close: Callable[[], None]) -> None:
        self._exchange = exchange
        # An attester holds it as long as it lives, so it is closed when it is collected.
        self._close = weakref.finalize(self, close)

    @classmethod
    def open(cls, address: str) -> Tpm:
        """Opens a device (/dev/tpmrm0) or a simulator's socket: tcp://host:port, unix:///path."""
        try:
            if address.startswith(("tcp://", "unix://")):
                return cls._over(_connect(address))
            handle = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as problem:
            raise TpmFailed(f"the TPM at {address} cannot be opened: {problem}") from None

        def exchange(command: bytes) -> bytes:
            os.write(handle, command)
            return os.read(handle, _MAX_ANSWER)

        return cls(exchange, lambda: os.close(handle))

    @classmethod
    def _over(cls, connection: socket.socket) -> Tpm:
        def exchange(command: bytes) -> bytes:
            connection.sendall(command)
            answer = b""
            size = _HEADER_BYTES
            while len(answer) < size:
                more = connection.recv(_MAX_ANSWER)
                if not more:
                    raise TpmFailed("the TPM closed the connection")
                answer += more
                if len(answer) >= _HEADER_BYTES:
                    size = int.from_bytes(answer[2:6], "big")
            return answer

        return cls(exchange, connection.close)

    def __enter__(self) -> Tpm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def call(
        self,
        name: str,
        code: int,
        handles: Sequence[int] = (),
        sessions: Sequence[int] = (),
        parameters: bytes = b"",
        *,
        gives_handle: bool = False,
    ) -> tuple[int, Cursor]:
        """Sends a command. Returns the new handle (or 0) and the answer's parameters."""
        body = b"".join(handle.to_bytes(4, "big") for handle in handles)
        if sessions:
            # No nonce, no password, and no attributes, so that a policy session ends with it.
            area = b"".join(one.to_bytes(4, "big") + bytes(5) for one in sessions)
            body += len(area).to_bytes(4, "big") + area
        body += parameters
        tag = _SESSIONS if sessions else _NO_SESSIONS
        size = _HEADER_BYTES + len(body)
        head = tag.to_bytes(2, "big") + size.to_bytes(4, "big") + code.to_bytes(4, "big")
        try:
            raw = self._exchange(head + body)
        except OSError as problem:
            raise TpmFailed(f"{name}: {problem}") from None
        answer = Cursor(raw, f"the TPM's answer to {name}", "big")
        answer_tag, _, failure = answer.number(2), answer.number(4), answer.number(4)
        if failure:
            raise TpmFailed(f"{name}: the TPM answers with error {failure:#x}", response=failure)
        handle = answer.number(4) if gives_handle else 0
        if answer_tag == _SESSIONS:
            answer.number(4)
        return handle, answer

    @contextmanager
    def primary(self, template: bytes) -> Iterator[tuple[int, bytes]]:
        """Makes a key of the endorsement hierarchy, the same each time. Yields handle and key."""
        parameters = sized(sized(b"") + sized(b"")) + sized(template) + sized(b"") + bytes(4)
        handle, answer = self.call(
            "CreatePrimary", 0x131, (ENDORSEMENT,), (PASSWORD,), parameters, gives_handle=True
        )
        try:
            yield handle, answer.sized(2)
        finally:
            self.flush(handle)

    def flush(self, handle: int) -> None:
        self.call("FlushContext", 0x165, (handle,))

    def read_public(self, handle: int) -> bytes | None:
        """The public part of a key. None if there is no such key."""
        answer = self._look_up("ReadPublic", 0x173, handle)
        return None if answer is None else answer.sized(2)

    def _look_up(self, name: str, code: int, handle: int) -> Cursor | None:
        """What the TPM says of a key or an index. None if it does not exist."""
        try:
            return self.call(name, code, (handle,))[1]
        except TpmFailed as failure:
            if failure.response != _NO_SUCH_HANDLE:
                raise
            return None

    def read_nv(self, index: int, authority: int | None = None) -> bytes | None:
        """Reads an index. None if it does not exist.

        `authority`: whose empty password opens it. By default it is the index's own.
        """
        found = self._look_up("NV_ReadPublic", 0x169, index)
        if found is None:
            return None
        public = Cursor(found.sized(2), "the TPM's index", "big")
        public.take(10)
        public.sized(2)
        size, read = public.number(2), b""
        while len(read) < size:
            wanted = min(_NV_CHUNK, size - len(read))
            parameters = wanted.to_bytes(2, "big") + len(read).to_bytes(2, "big")
            _, answer = self.call(
                "NV_Read", 0x14E, (authority or index, index), (PASSWORD,), parameters
            )
            read += answer.sized(2)
        return read

    def bank(self) -> int:
        """The bank of PCRs to read: SHA-256's, or SHA-384's if the TPM has no SHA-256 bank."""
        for bank in BANKS:
            _, answer = self.call("PCR_Read", 0x17E, parameters=selection((0,), bank))
            answer.take(4 + len(selection((0,), bank)))
            if answer.number(4):
                return bank
        raise TpmFailed("the TPM has neither a SHA-256 nor a SHA-384 bank of PCRs")

    def read_pcrs(self, pcrs: Sequence[int], bank: int = SHA256) -> bytes:
        values = b""
        for at in range(0, len(pcrs), _PCRS_AT_ONCE):
            some = pcrs[at : at + _PCRS_AT_ONCE]
            _, answer = self.call("PCR_Read", 0x17E, parameters=selection(some, bank))
            answer.take(4 + len(selection(some, bank)))
            if answer.number(4) != len(some):
                raise TpmFailed("the TPM does not have that bank of PCRs")
            values += b"".join(answer.sized(2) for _ in some)
        return values

    def quote(
        self, key: int, qualifying: bytes, pcrs: Sequence[int], bank: int = SHA256
    ) -> tuple[bytes, bytes]:
        """Returns the signed bytes and the signature."""
        parameters = sized(qualifying) + NULL.to_bytes(2, "big") + selection(pcrs, bank)
        _, answer = self.call("Quote", 0x158, (key,), (PASSWORD,), parameters)
        signed = answer.sized(2)
        scheme = answer.take(4)
        ecdsa = scheme[:2] == b"\x00\x18"
        parts = [sized(answer.sized(2)) for _ in range(2 if ecdsa else 1)]
        return signed, scheme + b"".join(parts)

    def activate(self, ak: int, ek: int, blob: bytes) -> bytes:
        """Opens a credential. The EK's own policy asks for the endorsement hierarchy's password."""
        public = Cursor(self.read_public(ek) or b"", "the endorsement key", "big")
        public.take(2)
        policy_hash = public.take(2)
        public.take(4)
        policy = public.sized(2)
        parameters = sized(secrets.token_bytes(16)) + sized(b"") + b"\x01"
        parameters += NULL.to_bytes(2, "big") + policy_hash
        session, _ = self.call(
            "StartAuthSession", 0x176, (NO_KEY, NO_KEY), (), parameters, gives_handle=True
        )
        try:
            self.call("PolicySecret", 0x151, (ENDORSEMENT, session), (PASSWORD,), bytes(10))
            if policy == EITHER_POLICY:
                either = len(_BRANCHES).to_bytes(4, "big") + b"".join(map(sized, _BRANCHES))
                self.call("PolicyOR", 0x171, (session,), (), either)
            _, answer = self.call("ActivateCredential", 0x147, (ak, ek), (PASSWORD, session), blob)
        except TpmFailed:
            self.flush(session)
            raise
        return answer.sized(2)


def selection(pcrs: Sequence[int], bank: int = SHA256) -> bytes:
    """A TPML_PCR_SELECTION of one bank."""
    bits = sum(1 << pcr for pcr in pcrs).to_bytes(PCRS // 8, "little")
    return (1).to_bytes(4, "big") + bank.to_bytes(2, "big") + bytes([len(bits)]) + bits


def _connect(address: str) -> socket.socket:
    scheme, _, rest = address.partition("://")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SECONDS)
        try:
            connection.connect(rest)
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_SECONDS)
