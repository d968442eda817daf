"""torchft with sealed traffic between replica groups: gradients, and the state of one that returns.

torchft numbers its replica groups anew at every change of members. The rank in a worker's
certificate stays the same all the while (replica_ranks.py).
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
    """The process group of torchft's Manager, made anew and sealed for every quorum.

    `replicas` is the largest number of replica groups that the job may have, the same on all
    workers. The Manager's `replica_id` has to end with this replica group's number, from 0, on
    every rank: it says which certificate is this worker's. The quorum does not, because the
    lighthouse that makes it is not authenticated.
    """

    def __init__(self, replicas: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        if replicas < 1:
            raise ConfigurationError(f"a job of {replicas} replica groups does not exist")
        super().__init__(timeout)
        self._pg: SealedProcessGroup | None
        self._replicas = replicas
        self._fatal: BaseException | None = None
        """Why no quorum can be served. The Manager only logs what goes wrong with one."""

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "torchft-sealring"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> SealedProcessGroup:
        try:
            return self._group_of_quorum(store, rank, world_size)
        except (ConfigurationError, AttributeError, TypeError) as problem:
            self._fatal = problem
            raise

    def _quorum(self) -> int:
        """The number of the quorum. torchft 0.2.0 calls it quorum_id, later ones uuid."""
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
        """What a call failed with that only a GPU's stream waited for.

        The Manager asks in should_commit(). What no later quorum can mend is raised there, in the
        script: the Manager would discard every step without end.
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
    """torchft's, made as there: DistributedDataParallel(manager, module).

    When an all-reduce fails, torchft 0.2.0's own raises AssertionError in backward(), because it
    expects that wait() never fails. Here the Manager gets the error, and discards the step.
    """

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        return _reduced(state, bucket)


def _reduced(manager: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    manager.allreduce(gradients).wait()  # an error is noted there, and should_commit() says no
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
    """A Manager of torchft's whose traffic between replica groups is sealed.

    `replica` is this replica group's number and `replicas` the largest number of them. `device` is
    where a state is received. All other options are the Manager's own. Its default transport for
    states unpickles what a plain HTTP server sends; this one uses the sealed group.
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
