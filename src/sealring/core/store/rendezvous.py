"""Makes torch use a sealed store: for workers by a URL, for torchrun's agents by a name.

    init_process_group("sealring", init_method="sealring://")
    torchrun --rdzv-backend sealring ...

The second is the more important one. Agents keep the state of their rendezvous as a pickle in a
store that listens on every interface: anyone who can write to it can run code in every agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    create_handler as create_dynamic_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.rendezvous import rendezvous as torchs_rendezvous

from sealring.core.identity.secret import fingerprint, read_secret
from sealring.core.store.meeting import Meeting
from sealring.core.store.sealed import SealedStore, keys_from_secret, store_under_secret
from sealring.errors import ConfigurationError

_default_groups_store: list[SealedStore] = []
"""Keeps the default group's store alive: torch wraps it in C++ and drops the Python object."""


def rendezvous(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """sealring:// is torch's env://, sealring://host:port its tcp://, with a sealed store."""
    scheme = "tcp" if urlsplit(url).netloc else "env"
    # There is no default group now: an earlier one does not need its store any more, and the next
    # may use the same port.
    _default_groups_store.clear()
    for store, rank, world in torchs_rendezvous(f"{scheme}:{url.partition(':')[2]}", **options):
        sealed = store_under_secret(store, os.environ)
        _default_groups_store.append(sealed)
        yield sealed, rank, world


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point for torchrun, which calls the function that this returns."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Returns torchrun's c10d rendezvous with its store sealed under the job secret.

    If --rdzv-conf has the machine's number (rank=N), as with `sealring run`, returns a Meeting of a
    fixed number of machines.
    """
    if params.get("rank") is not None:
        return _meeting(params)
    keys = keys_from_secret(os.environ, ["agent", params.run_id])
    _, store = create_backend(params)
    sealed = SealedStore(store, keys)
    return create_dynamic_handler(sealed, _SealedBackend(sealed, params.run_id), params)


def _meeting(params: RendezvousParameters) -> Meeting:
    try:
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
        if port == 0 and params.max_nodes > 1:
            raise ValueError("no other machine would know which port was free")
    except ValueError:
        raise ConfigurationError(
            f"--rdzv-endpoint is {params.endpoint!r}; pass HOST:PORT, with a port from 1 to 65535"
        ) from None
    secret = read_secret(os.environ)

    def sealed(store: Store, round_number: int) -> Store:
        if secret is None:
            return store
        context = ["agent", params.run_id, str(round_number)]
        return SealedStore(store, keys_from_secret(os.environ, context))

    return Meeting(
        host,
        port,
        int(params.config["rank"]),
        params.max_nodes,
        job=params.run_id,
        fingerprint="" if secret is None else fingerprint(secret),
        sealed=sealed,
        timeout=float(params.get("timeout", 600)),
    )


class _SealedBackend(C10dRendezvousBackend):
    @property
    def name(self) -> str:
        return "sealring"
