"""A light worker: all of sealring below torch, so that one process can have hundreds of them.

Each has its own identity, its own sessions and its own groups. Nothing is shared between two of
them but the process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sealring import _native, limits
from sealring.core.engine.collective import Collective
from sealring.core.engine.datatypes import DType, ReduceKind
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.handshake import SessionTable, Terms, group_context
from sealring.core.identity import Credentials
from sealring.core.links import Agreed, Store, agreed_epoch, build_mesh, lack_is_named
from sealring.core.schedule import Algorithm, Operation, chunks, cuts_into_chunks

_LOOPBACK: Final = {"SEALRING_ADDRESS": "127.0.0.1"}


@dataclass(slots=True)
class LightGroup:
    engine: CollectiveEngine
    mailbox: Mailbox
    world: int
    links_at_first: int
    agreed: Agreed
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def all_reduce(
        self, values: np.ndarray[Any, Any], algorithm: Algorithm, timeout_s: float = 60.0
    ) -> None:
        start, total = values.ctypes.data, values.nbytes
        slots = [(start, total)]
        if cuts_into_chunks(Operation.ALL_REDUCE, algorithm):
            cuts = chunks(values.size, self.world, values.itemsize)
            slots = [(start + offset, length) for offset, length in cuts]
        self._run(
            Collective(
                Operation.ALL_REDUCE,
                algorithm,
                slots,
                dtype=DType.FLOAT32,
                reduction=ReduceKind.SUM,
                total=values.nbytes,
            ),
            timeout_s,
        )

    def _run(self, collective: Collective, timeout_s: float) -> None:
        self.engine.run(next(self._numbers), collective, timeout_s)

    def close(self) -> None:
        self.mailbox.close()
        self.engine.close()


class LightWorker:
    def __init__(self, credentials: Credentials, world: int, store: Store, host: str) -> None:
        self.credentials = credentials
        self.sessions = SessionTable()
        self._world = world
        self._store = store
        self._host = host

    @property
    def rank(self) -> int:
        return self.credentials.rank

    @lack_is_named()
    def form(
        self,
        name: str,
        members: Sequence[int],
        *,
        timeout_s: float = 120.0,
        transport: Any = "tcp",
        record_bytes: int = limits.RECORD_BYTES,
        rekey_bytes: int = limits.REKEY_BYTES,
    ) -> LightGroup:
        """As core/group/create.py does it, without torch, GPUs and recorder."""
        ordered = tuple(members)
        place_of = {each: place for place, each in enumerate(ordered)}
        rank = place_of[self.rank]
        deadline = time.monotonic() + timeout_s
        store = _Prefixed(self._store, name)
        with agreed_epoch(store, ordered, self.rank, deadline) as epoch:
            terms = Terms(
                job=self.credentials.job,
                group=name,
                epoch=epoch,
                world=self._world,
                members=ordered,
                rank=self.rank,
                settings={"record_bytes": record_bytes},
                host=self._host,
            )
            mesh = build_mesh(
                store,
                self.credentials,
                terms,
                timeout=timeout_s,
                transport=transport,
                environ=_LOOPBACK,
                sessions=self.sessions,
            )
        agreed, late = mesh.agreed, mesh.late
        linked = {link.peer for link in mesh.links} | {self.rank}
        unlinked = agreed.group_keys([each for each in ordered if each not in linked])
        hosts = {place_of[each]: member.host for each, member in agreed.members.items()}
        shared: dict[str, Any] = {
            "members": ordered,
            "record_bytes": record_bytes,
            "rekey_bytes": rekey_bytes,
            "first_failure": _native.FirstFailure(),
            "hosts": hosts,
            "late": late,
        }
        of_messages = group_context(replace(terms, epoch=f"{epoch}.messages"))
        with mesh.handed_over():
            engine = CollectiveEngine(
                rank,
                len(ordered),
                context=group_context(terms),
                group_key=agreed.group_key(self.rank),
                links=[(place_of[link.peer], link) for link in mesh.links],
                unlinked={place_of[each]: key for each, key in unlinked.items()},
                **shared,
            )
            agreed.wipe()
            mailbox = Mailbox(rank, len(ordered), context=of_messages, links=[], **shared)
        return LightGroup(engine, mailbox, len(ordered), len(mesh.links), agreed)


class _Prefixed:
    """A store with a group's name before each key, as torch gives one to a group."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def set(self, key: str, value: str, /) -> object:
        return self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(f"{self._name}/{key}")

    def check(self, keys: list[str], /) -> bool:
        return self._store.check([f"{self._name}/{key}" for key in keys])

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return self._store.multi_get([f"{self._name}/{key}" for key in keys])

    def multi_set(self, keys: list[str], values: list[str], /) -> object:
        return self._store.multi_set([f"{self._name}/{key}" for key in keys], values)
