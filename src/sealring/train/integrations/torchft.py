"""torchft with sealed traffic between replica groups: gradients, and states for returning groups.

torchft renumbers its replica groups at every change of members. The rank in a worker's certificate
does not change (replica_ranks.py).
"""

from __future__ import annotations

from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
import torch.distributed as dist

from sealring.core.group.create import create_group, options_of_call
from sealring.core.group.process_group import SealedProcessGroup
from sealring.errors import ConfigurationError
from sealring.train.integrations.replica_ranks import check_members, rank_in_job

try:
    import torchft.ddp as torchft_ddp
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupWrapper
except ImportError as problem:
    raise ConfigurationError(
        f"torchft cannot be imported here ({problem}): pip install torchft"
    ) from problem


SUPPORTED: Final = "0.2.0, and nightly builds up to 2026.10.26"


def _installed_torchft() -> str:
    for name in ("torchft", "torchft-nightly"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


class ReplicaProcessGroup(ProcessGroupWrapper):  # type: ignore[misc]
    """The process group of torchft's Manager. Every quorum gets a new sealed group.

    `replicas` is the largest number of replica groups of the job; it must be equal on all workers.
    On every rank, the Manager's `replica_id` must end with this replica group's number, from 0. It
    tells which certificate is this worker's. The quorum cannot tell it, because the lighthouse that
    makes the quorum is not authenticated.
    """

    def __init__(self, replicas: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        if replicas < 1:
            raise ConfigurationError(f"a job of {replicas} replica groups does not exist")
        super().__init__(timeout)
        self._pg: SealedProcessGroup | None
        self._replicas = replicas
        self._fatal: BaseException | None = None
        """The error by which no quorum can be served. The Manager only logs a quorum's errors."""

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "torchft-sealring"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> SealedProcessGroup:
        try:
            return self._group_of_quorum(store, rank, world_size)
        except (ConfigurationError, AttributeError, TypeError) as problem:
            self._fatal = problem
            raise

    def _quorum(self) -> int:
        """The quorum's number, which torchft 0.2.0 calls quorum_id, and later versions uuid."""
        for name in ("_uuid", "_quorum_id"):
            if (number := getattr(self, name, None)) is not None:
                return int(number)
        raise ConfigurationError(
            f"torchft {_installed_torchft()} does not tell its process group which quorum it is "
            f"for: install a torchft that sealring supports ({SUPPORTED})"
        )

    def _group_of_quorum(self, store: Any, rank: int, world_size: int) -> SealedProcessGroup:
        group_rank, group_size = self._group_rank or 0, self._group_world_size or 1
        own = rank_in_job(self._replica_id, group_rank, group_size)
        members, size = self._global_ranks or [], self._replicas * group_size
        check_members(members, rank, own, size)
        return create_group(
            options_of_call(
                store,
                rank,
                world_size,
                timeout=self._timeout,
                name=f"torchft rank {group_rank} quorum {self._quorum()}",
                job_ranks=members,
                job_size=size,
            )
        )

    def errored(self) -> BaseException | None:
        """The error of a failed call for which only a GPU's stream waited, if there is one.

        The Manager calls this in should_commit(). An error that no later quorum can repair is
        raised here, and so in the script. Otherwise the Manager would discard every step for ever.
        """
        if self._fatal is not None:
            raise self._fatal
        return None if self._pg is None else self._pg.deferred_error()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()


class DistributedDataParallel(torchft_ddp.DistributedDataParallel):  # type: ignore[misc]
    """torchft's DistributedDataParallel(manager, module), with failures given to the Manager.

    When an all-reduce fails, torchft 0.2.0's own class raises AssertionError in backward(), because
    it expects that wait() never fails. With this class the Manager gets the error and discards the
    step.
    """

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        return _reduced(state, bucket)


def _reduced(manager: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    manager.allreduce(gradients).wait()  # the Manager notes an error; should_commit() returns False
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else []
    )
    done.set_result(gradients)
    return done


def sealed_manager(
    *,
    replica: int,
    replicas: int,
    name: str = "replica",
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(seconds=60),
    **options: Any,
) -> Manager:
    """Makes a torchft Manager whose traffic between replica groups is sealed.

    `replica` is this replica group's number, and `replicas` is the largest number of replica
    groups. A state is received on `device`. All other options are the Manager's. States are sent
    over the sealed group; the Manager's default transport would unpickle what a plain HTTP server
    sends.
    """
    if not 0 <= replica < replicas:
        raise ConfigurationError(f"replica group {replica} does not exist in a job of {replicas}")
    group = ReplicaProcessGroup(replicas, timeout)
    return Manager(
        pg=group,
        replica_id=f"{name}_{replica}",
        checkpoint_transport=PGTransport(group, timeout, torch.device(device)),
        timeout=timeout,
        **options,
    )
