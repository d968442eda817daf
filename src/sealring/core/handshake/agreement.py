"""Whether a verified peer's hello agrees with our terms. Pure; each disagreement has its error."""

from __future__ import annotations

from collections.abc import Mapping

from sealring.core.handshake.messages import Hello
from sealring.core.handshake.terms import Terms, members_digest
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import (
    DuplicateRank,
    SettingsMismatch,
    SuiteMismatch,
    WrongGroup,
    WrongJob,
    WrongRank,
    WrongWorldSize,
)
from sealring.limits import SUITE


def check_hello(hello: Hello, terms: Terms, peer: VerifiedPeer, who: str) -> None:
    if SUITE not in hello.suites:
        raise SuiteMismatch(
            f"{who} offers {', '.join(hello.suites)[:200]} and not {SUITE}: install one version of "
            "sealring everywhere"
        )
    if hello.job != terms.job:
        raise WrongJob(
            f"{who} is of job {terms.job} by its certificate and {hello.job} by its hello"
        )
    if hello.sender != peer.rank:
        raise WrongRank(f"{who} calls itself rank {hello.sender}, against its certificate")
    # First of what depends on the group: a worker of another one disagrees on nothing else.
    if (hello.group, hello.epoch) != (terms.group, terms.epoch):
        raise WrongGroup(
            f"{who} is in group {hello.group!r}, epoch {hello.epoch!r}, and rank {terms.rank} in "
            f"group {terms.group!r}, epoch {terms.epoch!r}: an earlier run is still alive, or the "
            "ranks make their groups in different orders",
            misdirected=True,
        )
    if peer.rank == terms.rank and hello.instance != terms.instance:
        raise DuplicateRank(
            f"{who} ({hello.host}) and the worker at {terms.host} both hold rank {terms.rank}: two "
            "workers were started with one RANK, or an earlier run is still alive"
        )
    if hello.receiver != terms.rank:
        raise WrongRank(
            f"{who} meant to reach rank {hello.receiver} and reached rank {terms.rank}: the "
            "rendezvous store is wrong",
            misdirected=True,
        )
    if hello.world != terms.world:
        raise WrongWorldSize(
            f"{who} counts {hello.world} workers and rank {terms.rank} counts {terms.world}: start "
            "all workers with one WORLD_SIZE"
        )
    if hello.members != members_digest(terms.members) or peer.rank not in terms.members:
        raise WrongGroup(
            f"{who} and rank {terms.rank} list different members of group {terms.group!r}: call "
            "new_group with the same ranks everywhere"
        )
    if hello.transcript != terms.transcript:
        raise WrongGroup(
            f"{who} and rank {terms.rank} formed group {terms.group!r} with different members or "
            "settings: one of them is of another attempt, or a member told them different things"
        )
    if hello.settings != dict(terms.settings):
        raise SettingsMismatch(
            f"{who} runs with {_listed(hello.settings, terms.settings)} and rank {terms.rank} with "
            f"{_listed(terms.settings, hello.settings)}: set them alike everywhere"
        )


def _listed(settings: Mapping[str, int], others: Mapping[str, int]) -> str:
    """Those that the other side has otherwise, or not at all."""
    apart = sorted(settings.items() - others.items())
    missing = sorted(f"no {name}" for name in others.keys() - settings.keys())
    return ", ".join([*(f"{name}={value}" for name, value in apart), *missing])[:200]
