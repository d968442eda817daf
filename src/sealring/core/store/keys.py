"""Where a store's key comes from: the job's secret, or a group whose members proved themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from sealring import _native
from sealring.core.handshake.secrets import Wiped
from sealring.core.identity.names import check_job
from sealring.core.identity.secret import default_job, derive_store_key, read_secret
from sealring.core.store.sealed import SealedStore
from sealring.core.store.values import StoreKeys
from sealring.errors import ConfigurationError, Unsupported
from sealring.limits import KEY_BYTES


def open_sealed_store(store: Store, environ: Mapping[str, str] | None = None) -> SealedStore:
    """`store` under a key that every holder of the job's secret derives. No group is needed.

    Values of another job, of another run of torchrun's or of an earlier restart do not open.
    """
    environ = os.environ if environ is None else environ
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return SealedStore(store, keys_from_secret(environ, ["worker", run, restart]))


def keys_from_secret(environ: Mapping[str, str], context: list[str]) -> StoreKeys:
    secret = read_secret(environ)
    if secret is None:
        raise ConfigurationError(
            "a store can be sealed before there is a group only under a job secret "
            "(SEALRING_SECRET_FILE): workers with certificates share no key until they have met. "
            "Make the group first, then call sealring.core.store.seal_group_store()"
        )
    job = environ.get("SEALRING_JOB") or default_job(secret)
    check_job(job)
    return StoreKeys.derive(derive_store_key(secret), [job, *context])


def sealed_group_store(group: dist.ProcessGroup | None = None) -> SealedStore:
    """The group's store under a key that only this group's members have. All of them call it.

    The key is random and goes over the group's sealed links, so this serves every kind of identity,
    and nothing that was ever written before opens under it.
    """
    group = _sealed_group(group)
    _, store = distributed_c10d._world.pg_map[group]
    first = dist.get_rank(group) == 0
    key = _native.Secret.random(KEY_BYTES) if first else _native.Secret.zeros(KEY_BYTES)
    with Wiped(key):
        # The tensor has the secret's own memory.
        dist.broadcast(
            torch.frombuffer(key, dtype=torch.uint8),
            src=dist.get_global_rank(group, 0),
            group=group,
        )
        return SealedStore(store, StoreKeys.derive(key, ["group"]))


def seal_group_store(group: dist.ProcessGroup | None = None) -> SealedStore:
    """Makes torch itself use the sealed store from here on: for barriers, and for new groups.

    All members call it, once, after init_process_group.
    """
    group = _sealed_group(group)
    sealed = sealed_group_store(group)
    backend, _ = distributed_c10d._world.pg_map[group]
    distributed_c10d._world.pg_map[group] = (backend, sealed)
    return sealed


def _sealed_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    if group is None or dist.get_backend(group) != "sealring":
        raise Unsupported("a store's key can only be agreed over a group of the sealring backend")
    return group
