"""From init_process_group's arguments to a group: identity, handshake, links, engine."""

from __future__ import annotations

import atexit
import os
import secrets
import weakref
from typing import Any

import torch.distributed as dist

from sealring import limits
from sealring.engine.cpu import CpuEngine
from sealring.group.backward import restore_errors_in_backward
from sealring.group.monitored import Arrivals, serve_torchs_own_call
from sealring.group.process_group import SealedProcessGroup
from sealring.group.settings import read_settings
from sealring.handshake import Terms, group_context
from sealring.identity import load_credentials
from sealring.links import build_mesh


def create_group(options: Any) -> SealedProcessGroup:
    """Called by torch on every rank of the new group; returns when all of them are linked."""
    settings = read_settings(os.environ)
    group_rank, group_world = options.group_rank, options.group_size
    members = tuple(options.global_ranks_in_group) or tuple(range(group_world))
    rank = members[group_rank]
    world = dist.get_world_size() if dist.is_initialized() else group_world
    credentials = load_credentials(rank=rank, world=world)

    name = options.group_id or "default"
    # A store may outlive a group: the second one of a name must not read what the first one left.
    # A store that lies here only makes the ranks disagree, which the handshake tells them.
    incarnation = options.store.add(f"sealring/attempts/{rank}", 1)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    terms = Terms(
        job=credentials.job,
        group=name,
        epoch=f"{restart}.{incarnation}",
        world=world,
        members=members,
        rank=rank,
        settings=settings.shared,
    )
    # Fresh for every group, so its nonces may start at zero.
    group_key = secrets.token_bytes(limits.KEY_BYTES)
    links = build_mesh(
        options.store,
        credentials,
        terms,
        group_key,
        incarnation=str(incarnation),
        timeout=options.timeout.total_seconds(),
        transport=settings.transport,
    )
    engine = CpuEngine(
        group_rank,
        group_world,
        context=group_context(terms),
        group_key=group_key,
        links=[(members.index(link.peer), link) for link in links],
        record_bytes=settings.record_bytes,
        rekey_bytes=settings.rekey_bytes,
    )
    group = SealedProcessGroup(
        group_rank,
        group_world,
        engine,
        options.timeout,
        arrivals=Arrivals(options.store, group_rank, group_world, terms.epoch),
        algorithm=settings.algorithm,
    )
    restore_errors_in_backward()
    serve_torchs_own_call(SealedProcessGroup)
    _leave_in_order(group)
    return group


def _leave_in_order(group: SealedProcessGroup) -> None:
    """A script that ends without destroy_process_group still says goodbye to its peers."""
    reference = weakref.ref(group)

    def leave() -> None:
        if (alive := reference()) is not None:
            alive.leave()

    atexit.register(leave)
