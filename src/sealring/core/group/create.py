"""Makes a group from init_process_group's arguments: identity, handshake, links, engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from cryptography import x509

from sealring import _native
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.flight import FlightRecorder
from sealring.core.engine.gpu_calls import GpuCalls, in_use
from sealring.core.engine.lanes import threads_by_default
from sealring.core.engine.mailbox import Mailbox
from sealring.core.group.backward import interrupt_on_signal, restore_errors_in_backward
from sealring.core.group.monitored import Arrivals
from sealring.core.group.process_group import SealedProcessGroup
from sealring.core.group.settings import read_settings
from sealring.core.group.torch_functions import pass_calls_to_groups
from sealring.core.handshake import Terms, group_context, process_sessions
from sealring.core.handshake.terms import PipeName
from sealring.core.hooks import (
    Enrolment,
    GroupMade,
    enrolment_of,
    group_observers,
    late_observers,
)
from sealring.core.identity import load_credentials
from sealring.core.identity.credentials import check_dates
from sealring.core.identity.process import shut_out_debuggers
from sealring.core.links import (
    Link,
    Mesh,
    agreed_epoch,
    build_mesh,
    explain_resource_limits,
    run_of,
)
from sealring.core.schedule import Selection
from sealring.core.settings import CERTIFICATE, usable_cores
from sealring.errors import ConfigurationError, Unsupported

# ---- a group's options


DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    store: Any
    """The store where the ranks meet. No other group uses the same keys in it."""
    group_rank: int
    members: tuple[int, ...]
    """The number in the job of each rank of the group."""
    world: int
    """The number of ranks of the job, inside and outside this group."""
    timeout: timedelta = DEFAULT_TIMEOUT
    name: str = ""
    within: str = ""
    """The `run` of torch's default group if torch makes this group within it, else ''."""

    def __post_init__(self) -> None:
        if not 0 <= self.group_rank < len(self.members):
            raise ConfigurationError(
                f"rank {self.group_rank} does not exist in a group of {len(self.members)}"
            )

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.members[self.group_rank]


def options_of_torch(options: Any) -> GroupOptions:
    """The options of a group that torch makes; `options` is what torch passes to a backend."""
    return _options(
        options.store,
        options.group_rank,
        options.group_size,
        options.global_ranks_in_group,
        timeout=options.timeout,
        name=options.group_id,
        within=_run_around(options.global_ranks_in_group, options.group_rank),
    )


def options_of_call(
    store: Any,
    rank: int,
    size: int,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str = "",
    job_ranks: Any = None,
    job_size: int | None = None,
) -> GroupOptions:
    """The options of a group made by sealring.create_group, from its arguments."""
    return _options(store, rank, size, job_ranks, job_size, timeout=timeout, name=name)


def _options(
    store: Any,
    rank: int,
    size: int,
    job_ranks: Any,
    job_size: int | None = None,
    *,
    timeout: timedelta,
    name: str,
    within: str = "",
) -> GroupOptions:
    members = tuple(job_ranks or ()) or tuple(range(size))
    if len(members) != size:
        raise ConfigurationError(
            f"the group has {size} ranks, and {len(members)} ranks of the job are named for them"
        )
    if job_size is None:
        job_size = _job_size(members) if job_ranks else size
    return GroupOptions(store, rank, members, job_size, timeout, name, within)


def _run_around(ranks: Any, place: int) -> str:
    """The `run` of the default group within which torch makes the group of these ranks.

    It is '' for the default group itself, if the default group has another backend, and if a
    framework passes ranks that are not those of the default group.
    """
    if not ranks or not dist.is_initialized():
        return ""
    if max(ranks) >= dist.get_world_size() or ranks[place] != dist.get_rank():
        return ""
    run = getattr(dist.group.WORLD, "run", "")
    return run if isinstance(run, str) else ""  # another backend's `run` may be anything


def _job_size(members: tuple[int, ...]) -> int:
    """The size of torch's default group, or the least size that includes all members.

    The members need not be ranks of the default group: a process may belong to several jobs.
    """
    least = max(members) + 1
    if not dist.is_initialized():
        return least
    return max(least, dist.get_world_size())


# ---- the group


def create_group(options: GroupOptions) -> SealedProcessGroup:
    """Makes a group. Called on every rank of it; returns when all ranks are linked."""
    settings = read_settings(os.environ)
    # Before ranks meet, so that a wrong setting is refused and modules are imported early.
    observers = [observe(os.environ) for observe in group_observers.wanted(os.environ)]
    shut_out_debuggers()
    members, group_rank, group_world = options.members, options.group_rank, len(options.members)
    rank, world = options.rank, options.world
    place_of = {each: place for place, each in enumerate(members)}
    deadline = time.monotonic() + options.timeout.total_seconds()
    enrolment = enrolment_of(rank, world, os.environ, deadline)
    credentials = (
        load_credentials(rank=rank, world=world)
        if enrolment is None
        else enrolment.credentials(deadline)
    )
    check_dates(credentials)

    lease = None if enrolment is None else enrolment.lease

    epochs = agreed_epoch(options.store, members, rank, deadline, within=options.within)
    with explain_resource_limits(), epochs as epoch:
        terms = Terms(
            job=credentials.job,
            group=options.name or "default",
            epoch=epoch,
            world=world,
            members=members,
            rank=rank,
            settings={**settings.shared, **credentials.settings},
            host=settings.host,
        )
        mesh = build_mesh(
            options.store,
            credentials,
            terms,
            timeout=max(0.0, deadline - time.monotonic()),
            transport=settings.transport,
            sessions=process_sessions(credentials.job, rank),
            current=None if enrolment is None else enrolment.renewed_credentials,
        )
        agreed, exchange = mesh.agreed, mesh.exchange
        linked = {link.peer for link in mesh.links} | {rank}
        unlinked = agreed.group_keys([each for each in members if each not in linked])
        hosts = {place_of[each]: member.host for each, member in agreed.members.items()}
        first_failure = _native.FirstFailure()
        with mesh.handed_over():
            engine = CollectiveEngine(
                group_rank,
                group_world,
                context=group_context(terms),
                group_key=agreed.group_key(rank),
                links=[(place_of[link.peer], link) for link in mesh.links],
                host=terms.host,
                members=members,
                record_bytes=settings.record_bytes,
                rekey_bytes=settings.rekey_bytes,
                first_failure=first_failure,
                lease=lease,
                hosts=hosts,
                unlinked={place_of[each]: key for each, key in unlinked.items()},
                exchange=exchange,
                threads=settings.threads or _threads(terms.host, hosts),
            )
        gpu = GpuCalls(engine, settings.cuda_wait, settings.gpu_wire)
        try:
            objection = _problem_of(gpu)
            # Messages have their own pipes and keys, so that a message does not wait behind a
            # collective, and a collective does not wait behind a message.
            mailbox = Mailbox(
                group_rank,
                group_world,
                context=group_context(terms),
                links=[
                    (place_of[link.peer], link)
                    for link in _pipes_for_messages(mesh, members, objection, deadline)
                ],
                members=members,
                record_bytes=settings.record_bytes,
                rekey_bytes=settings.rekey_bytes,
                first_failure=first_failure,
                lease=lease,
                hosts=hosts,
                exchange=exchange,
            )
        except BaseException:
            engine.close()  # the error's traceback may keep the engine alive
            raise
        finally:
            agreed.wipe()
    with explain_resource_limits(), _closed_on_failure(engine, mailbox):
        recorder = FlightRecorder(
            engine,
            mailbox,
            job=terms.job,
            job_rank=rank,
            group=terms.group,
            group_id=group_context(terms).hex()[:16],
            epoch=terms.epoch,
            members=members,
        )
        group = SealedProcessGroup(
            group_rank,
            group_world,
            engine,
            mailbox,
            options.timeout,
            recorder=recorder,
            arrivals=Arrivals(options.store, group_rank, group_world, terms.epoch),
            selection=Selection(engine.topology, settings.table, settings.algorithms),
            gpu=gpu,
            run=run_of(agreed.transcript),
        )
    if mesh.sparse:
        # There are no pipes for messages yet, so the ranks agree by a collective.
        _require_agreement(group, objection)
    try:
        restore_errors_in_backward()
        pass_calls_to_groups(SealedProcessGroup)
        interrupt_on_signal(engine)
        made = GroupMade(
            recorder,
            world,
            terms.host,
            _identity(enrolment),
            _certificate_ends(credentials.certificate, enrolment),
            _torch_groups,
        )
        for observer in [*observers, *late_observers]:
            observer(made)
        if enrolment is not None:
            # The keys of every other member, also without a session or a link with it.
            keys = {place_of[each]: member.key for each, member in agreed.members.items()}
            keys.pop(group_rank)
            enrolment.watch(group, keys)
    except BaseException:
        # The other ranks have the group, and the error's traceback may keep this end alive.
        group.abort()
        raise
    return group


@contextmanager
def _closed_on_failure(engine: CollectiveEngine, mailbox: Mailbox) -> Iterator[None]:
    """Closes mailbox and engine if an error occurs within the context.

    The other ranks already have the group and must learn at once that this rank failed. Without
    this, the error's traceback would keep the engine with its links and keys.
    """
    try:
        yield
    except BaseException:
        try:
            mailbox.close()
        finally:
            engine.close()
        raise


def _threads(host: str, hosts: Mapping[int, str]) -> int:
    """The number of threads of this rank: its part of the cores that its host's ranks share."""
    here = sum(each == host for each in hosts.values())
    # Torchrun's number also counts ranks of the host that are not in this group.
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return threads_by_default(usable_cores(), max(here, int(local) if local.isdecimal() else 0))


def _identity(enrolment: Enrolment | None) -> Literal["secret", "certificate", "broker"]:
    if enrolment is not None:
        return "broker"
    return "certificate" if CERTIFICATE.read(os.environ) else "secret"


def _certificate_ends(first: x509.Certificate, enrolment: Enrolment | None) -> Callable[[], float]:
    """Returns a function that tells when this worker's newest certificate expires.

    It refers only to the certificate, so that it does not keep the key after the group has ended.
    """

    def ends() -> float:
        newest = first if enrolment is None else enrolment.certificate
        return newest.not_valid_after_utc.timestamp()

    return ends


def _torch_groups() -> list[tuple[str, str, int, bool]]:
    """Name, backend, size and "is sealed" of each of torch's groups.

    Observers call this on another thread than the script's, so it copies torch's tables first.
    """
    world = c10d._world
    configurations, names = dict(world.pg_backend_config), dict(world.pg_names)
    return [
        (
            names.get(group, ""),
            configurations.get(group, ""),
            group.size(),
            isinstance(group, SealedProcessGroup),
        )
        for group in list(world.pg_map)
    ]


def _pipes_for_messages(
    mesh: Mesh, members: Sequence[int], objection: Unsupported | None, deadline: float
) -> list[Link]:
    """Opens the pipes for messages to all members, if all pairs are linked when the group forms.

    If a rank has an objection, this raises Unsupported on all ranks. In a group that is not fully
    linked it returns [].
    """
    if mesh.sparse:
        return []
    if mesh.exchange is None:
        if objection is not None:
            raise objection
        return []
    names = [PipeName(rank, "messages") for rank in members if rank != mesh.exchange.rank]
    within_s = max(0.0, deadline - time.monotonic())
    return mesh.exchange.open_agreed(names, within_s, "" if objection is None else str(objection))


def _require_agreement(group: SealedProcessGroup, objection: Unsupported | None) -> None:
    try:
        group.require_agreement("" if objection is None else str(objection))
    except Unsupported:
        group.shutdown()  # not abort(): ranks further down the tree are still being told
        raise
    except BaseException:
        group.abort()
        raise


def _problem_of(gpu: GpuCalls) -> Unsupported | None:
    """Why this process's GPU cannot be used; found now and not in the middle of training."""
    if (device := in_use(os.environ)) is None:
        return None
    try:
        gpu.attach(device)
    except Unsupported as problem:
        return problem
    return None
