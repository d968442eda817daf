"""What `sealring top` and `sealring doctor --watch` show of a group and of its process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch.distributed.distributed_c10d as c10d
from cryptography import x509

from sealring.engine.engine import CollectiveEngine
from sealring.engine.link_ends import LinkSocket
from sealring.engine.mailbox import Mailbox
from sealring.group.options import GroupOptions
from sealring.group.process_group import SealedProcessGroup
from sealring.handshake import Terms
from sealring.live.gather import GroupFacts, ProcessFacts
from sealring.live.status import TorchGroup
from sealring.sealed_only.setting import may_be_required

if TYPE_CHECKING:  # its packages are an extra
    from sealring.broker.enrolment import Enrolment


def group_facts(engine: CollectiveEngine, mailbox: Mailbox) -> GroupFacts:
    """Refers to both weakly: a group that has ended leaves nothing behind."""
    engine_alive, mailbox_alive = weakref.ref(engine), weakref.ref(mailbox)

    def links() -> list[LinkSocket]:
        ends = (engine_alive(), mailbox_alive())
        return [each for end in ends if end is not None for each in list(end.link_sockets)]

    def gpu_wire() -> str | None:
        known = engine_alive()
        return None if known is None or known.wire is None else str(known.wire)

    return GroupFacts(links, gpu_wire)


def process_facts(
    options: GroupOptions,
    terms: Terms,
    certificate: x509.Certificate,
    enrolment: Enrolment | None,
    environ: Mapping[str, str],
) -> ProcessFacts:
    return ProcessFacts(
        job=terms.job,
        rank=options.rank,
        size=options.world,
        host=terms.host,
        identity=_identity(enrolment, environ),
        certificate_ends=lambda: (
            certificate if enrolment is None else enrolment.certificate
        ).not_valid_after_utc.timestamp(),
        sealed_only=lambda: may_be_required(os.environ),
        store=_store(environ),
        torch_groups=_torch_groups,
    )


def _identity(
    enrolment: Enrolment | None, environ: Mapping[str, str]
) -> Literal["secret", "certificate", "broker"]:
    if enrolment is not None:
        return "broker"
    return "certificate" if environ.get("SEALRING_CERTIFICATE") else "secret"


def _store(environ: Mapping[str, str]) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else None


def _torch_groups() -> list[TorchGroup]:
    """Called on another thread than the script's: copies first."""
    world = c10d._world
    configurations = dict(world.pg_backend_config)
    names = dict(world.pg_names)
    return [
        TorchGroup(
            name=names.get(group, ""),
            backend=configurations.get(group, ""),
            size=group.size(),
            sealed=isinstance(group, SealedProcessGroup),
        )
        for group in list(world.pg_map)
    ]
