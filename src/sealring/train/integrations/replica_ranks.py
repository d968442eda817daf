"""The ranks of workers in a job of torchft's replica groups, which may leave and return.

The job has a fixed largest number of replica groups of equal size. A worker's rank is `number of
its replica group * size of a replica group + rank within it`. Its certificate shows this rank,
whatever replica groups take part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from sealring.errors import ConfigurationError, DuplicateRank, WrongPeer

_NUMBER: Final = re.compile(r"[0-9]+\Z")


def rank_in_job(replica_id: str | None, group_rank: int, group_size: int) -> int:
    """This worker's rank in the job, computed from its settings and not from a quorum."""
    found = _NUMBER.search(replica_id or "")
    if found is None:
        raise ConfigurationError(
            f"the Manager's replica_id is {replica_id!r}: end it with this replica group's number, "
            "as in gpt_3, because the worker's rank in the job follows from it"
        )
    return int(found.group()) * group_size + group_rank


def check_members(members: Sequence[int], position: int, own: int, size: int) -> None:
    """Checks a quorum's list of members. `own` is this worker's rank in the job.

    The list comes from a lighthouse, which may be wrong or may lie. The handshake proves the other
    members' ranks.
    """
    if own >= size:
        raise ConfigurationError(
            f"this worker is rank {own} of a job of {size}: pass a larger `replicas` on all workers"
        )
    if len(set(members)) != len(members):
        raise DuplicateRank(
            f"the quorum lists a rank twice ({', '.join(map(str, members))}): give each replica "
            "group a replica_id that ends with a number of its own. After a restart this passes "
            "when the lighthouse has dropped the process before"
        )
    listed = members[position] if 0 <= position < len(members) else None
    if listed != own:
        raise WrongPeer(
            f"the quorum lists this worker as rank {listed} of the job, and it is rank {own}: pass "
            "replica_id to the Manager on every rank. If that is done, the lighthouse is wrong",
            peer=own,
            code="handshake.wrong_rank",
        )
