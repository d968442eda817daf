"""How the collectives of a results file were run: by which algorithms, over which transport."""

from __future__ import annotations

from functools import lru_cache

from sealring.plan.collectives import Cluster
from sealring.plan.layouts import Setting
from sealring.plan.profiles import Profile, Way, load_network, with_figures
from sealring.results import Results
from sealring.results.schema import Transport
from sealring.schedule.table import AlgorithmTable, parse_table


def setting_of(
    results: Results, profile: Profile, way: Way, ranks: int, transport: Transport = "shm"
) -> Setting:
    """So many ranks of the machine, with the choice of algorithms that was made there."""
    if way == "sealed" and transport == "tcp":
        profile = _over_sockets(profile)
    network = load_network(profile.network)
    cluster = Cluster(ranks, ranks)
    return Setting(profile, way, network, cluster, table=_table(results.algorithms))


def _over_sockets(profile: Profile) -> Profile:
    """Ranks of one host that talk by TCP: they choose algorithms as all ranks of one host do."""
    assert profile.sealed is not None
    rate = profile.sealed.between_engine_bytes_per_s
    return with_figures(
        profile,
        "sealed",
        rate.source,
        inside_push_bytes_per_s=rate.value,
        inside_forward_bytes_per_s=rate.value,
        inside_pull_bytes_per_s=rate.value,
    )


@lru_cache(maxsize=8)
def _table(text: str) -> AlgorithmTable | None:
    """None, which is sealring's own, where the file does not say it."""
    return parse_table(text, "the results' algorithms") if text else None
