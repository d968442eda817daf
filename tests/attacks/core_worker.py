"""A worker that reports its keys, masked, and writes its memory to files for the test to search.

While its group lives, rank 0 writes two files: all the memory of a forked child, and what a core
file of rank 0 would hold. After the group has ended, rank 0 dumps core.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any, Final

import torch
import torch.distributed as dist

from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.group import create
from sealring.core.handshake import resumption, sessions, tls
from sealring.core.handshake.statements import Statements
from sealring.core.links import forming
from sealring.limits import KEY_BYTES
from tests.attacks.key_search import masked

_PR_SET_DUMPABLE: Final = 4
OWN_MEMORY: Final = "own.memory"
CHILDS_MEMORY: Final = "child.memory"
_BLOCK: Final = 1 << 18


def report(name: str, secret: object) -> None:
    print("key", name.replace(" ", "-"), masked(secret), flush=True)


def record_keys() -> None:
    """Reports every key that set-up hands on, and the secrets of its TLS connections."""

    class RecordedEngine(CollectiveEngine):
        def __init__(self, *arguments: Any, links: Any, group_key: Any, **options: Any) -> None:
            links = list(links)
            report("group key", group_key)
            for peer, link in links:
                report(f"to {peer}", link.send_key)
                report(f"from {peer}", link.receive_key)
                report(f"group key of {peer}", link.peer_group_key)
            super().__init__(*arguments, links=links, group_key=group_key, **options)

    class RecordedMailbox(Mailbox):
        def __init__(self, *arguments: Any, links: Any, **options: Any) -> None:
            links = list(links)
            for peer, link in links:
                report(f"messages to {peer}", link.send_key)
                report(f"messages from {peer}", link.receive_key)
            super().__init__(*arguments, links=links, **options)

    create.CollectiveEngine = RecordedEngine  # type: ignore[attr-defined]
    create.Mailbox = RecordedMailbox  # type: ignore[attr-defined]
    export, context = tls.TlsConnection.export, tls.new_context
    numbers = iter(range(1000))

    def recorded_export(self: Any, *arguments: Any) -> Any:
        exported = export(self, *arguments)
        report(f"exporter {next(numbers)}", exported)
        return exported

    def recorded_context(*arguments: Any, **options: Any) -> Any:
        made = context(*arguments, **options)

        def on_secret(_: object, line: bytes) -> None:
            # The secret is hexadecimal text here, but the test searches for its bytes.
            name, _, secret = line.decode().split()
            values = (int(secret[at : at + 2], 16) for at in range(0, len(secret), 2))
            report(f"TLS {name} {next(numbers)}", bytearray(values))

        made.set_keylog_callback(on_secret)
        return made

    class RecordedStatements(Statements):
        def __init__(self, encoded: Any) -> None:
            said = list(encoded)
            for each in said:
                with memoryview(each) as whole, whole[-KEY_BYTES:] as contribution:
                    report(f"contribution {next(numbers)}", contribution)
            super().__init__(said)

        def group_secret(self, transcript: bytes) -> Any:
            secret = super().group_secret(transcript)
            report(f"group secret {next(numbers)}", secret)
            return secret

    forming.Statements = RecordedStatements  # type: ignore[attr-defined]
    take_step, take_keys = sessions.Chain.take_step, resumption.SessionConnection.take_keys
    by_session = resumption.SessionConnection.export

    def recorded_step(self: Any, *arguments: Any) -> Any:
        report(f"session {next(numbers)}", self.secret)
        connection = take_step(self, *arguments)
        report(f"session's connection {next(numbers)}", connection)
        report(f"session {next(numbers)}", self.secret)
        return connection

    def recorded_keys(self: Any, *arguments: Any, **options: Any) -> None:
        take_keys(self, *arguments, **options)
        keys = self._secret.derive(b"", resumption.SETUP_KEYS, 2 * KEY_BYTES)
        for start in (0, KEY_BYTES):
            key = keys.part(start, KEY_BYTES)
            report(f"set-up key {next(numbers)}", key)
            key.wipe()
        keys.wipe()

    def recorded_by_session(self: Any, *arguments: Any) -> Any:
        exported = by_session(self, *arguments)
        report(f"session's exporter {next(numbers)}", exported)
        return exported

    sessions.Chain.take_step = recorded_step  # type: ignore[assignment, method-assign]
    resumption.SessionConnection.take_keys = recorded_keys  # type: ignore[method-assign]
    resumption.SessionConnection.export = recorded_by_session  # type: ignore[assignment, method-assign]
    tls.TlsConnection.export = recorded_export  # type: ignore[assignment, method-assign]
    tls.new_context = recorded_context


def train() -> None:
    tensor = torch.ones(100_000)
    for _ in range(16):
        dist.all_reduce(tensor)
    message = torch.ones(100_000)
    if dist.get_rank() == 0:
        dist.send(message, dst=1)
        dist.recv(message, src=1)
    else:
        dist.recv(message, src=0)
        dist.send(message, dst=0)
    group = dist.group.WORLD
    assert group is not None
    print("rekeys", max(group.account()["rekeys"]), flush=True)  # type: ignore[attr-defined]


def dump_core() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    os.abort()


def write_memory(path: str, *, as_core: bool) -> None:
    """Writes all writable memory; with `as_core` it skips what MADV_DONTDUMP excludes."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    mappings: list[tuple[int, int]] = []
    with open("/proc/self/smaps") as listing:
        for line in listing:
            fields = line.split()
            if "-" in fields[0] and fields[1].startswith("rw"):
                start, end = (int(each, 16) for each in fields[0].split("-"))
                mappings.append((start, end))
            elif "-" in fields[0]:
                mappings.append((0, 0))
            elif fields[0] == "VmFlags:" and as_core and "dd" in fields:
                mappings.pop()
    nothing = bytes(_BLOCK)
    with open("/proc/self/mem", "rb", 0) as memory, open(path, "wb", 0) as out:
        for start, end in mappings:
            for at in range(start, end, _BLOCK):
                try:
                    block = os.pread(memory.fileno(), min(_BLOCK, end - at), at)
                except OSError:
                    break
                if block != nothing[: len(block)]:
                    out.write(block)


def main() -> None:
    record_keys()
    dist.init_process_group("sealring")
    train()
    rank = dist.get_rank()
    if rank == 0:
        write_memory(OWN_MEMORY, as_core=True)
        if (child := os.fork()) == 0:
            write_memory(CHILDS_MEMORY, as_core=False)
            os._exit(0)
        os.waitpid(child, 0)
    dist.destroy_process_group()
    if rank == 0:
        dump_core()


if __name__ == "__main__":
    main()
