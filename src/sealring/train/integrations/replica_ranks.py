"""The ranks of workers in a job of torchft's replica groups, which come and go.

The job has room for a fixed number of replica groups of equal size. A worker is rank `number of
its replica group * size of a replica group + rank within it`, and that is the rank its certificate
shows, whichever replica groups take part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from sealring.errors import ConfigurationError, DuplicateRank, WrongPeer

_NUMBER: Final = re.compile(r"[0-9]+\Z")


def rank_in_job(replica_id: str | None, group_rank: int, group_size: int) -> int:
    """From what this worker was started with, and not from a quorum."""
    found = _NUMBER.search(replica_id or "")
    if found is None:
        raise ConfigurationError(
            f"the Manager's replica_id is {replica_id!r}: end it with this replica group's number, "
            "as in gpt_3, because the worker's rank in the job follows from it"
        )
    return int(found.group()) * group_size + group_rank


def check_members(members: Sequence[int], position: int, own: int, size: int) -> None:
    """`members` comes from a lighthouse that may be wrong, or may lie; `own` is this worker's rank.

    The handshake proves the others' ranks.
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
