"""`sealring bench allreduce`: sealed, by plaintext Gloo and by the GPU-TEE path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sealring import limits
from sealring.bench.exchange import Effort, Exchange, Progress, measure


def measure_allreduce(
    ranks: int,
    sizes: Sequence[int],
    transport: str,
    variants: Sequence[str],
    effort: Effort,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Iterator[Exchange]:
    """With `threads`, so many share a large tensor on each rank."""
    plan = [("all_reduce", size) for size in sizes]
    return measure(
        plan, ranks, transport, variants, effort, progress, section="allreduce", threads=threads
    )


def row(case: Exchange) -> dict[str, Any]:
    """One case as JSON; the ratios are None where they would be noise."""
    sealed, gloo, cc = (case.samples.get(each) for each in ("sealed", "plain", "cc"))
    assert sealed is not None
    assert gloo is not None
    compared, emulated = case.against_plain(), case.against_plain("cc")
    assert compared is not None
    return {
        "ranks": case.ranks,
        "bytes": case.bytes,
        "transport": case.transport,
        "threads": case.threads,
        "suite": limits.SUITE,
        "sealed_us": round(sealed.median * 1e6, 1),
        "gloo_us": round(gloo.median * 1e6, 1),
        "cc_us": round(cc.median * 1e6, 1) if cc else None,
        "ratio": _rounded(compared.told),
        "noise": round(compared.noise, 4),
        "cc_ratio": _rounded(emulated.told) if emulated else None,
        "sealed_bytes": case.rank_bytes[0][0],
        "memory_bytes_per_link": case.memory_bytes // max(1, case.ranks - 1),
        "sealed_spread": round(sealed.spread, 4),
        "gloo_spread": round(gloo.spread, 4),
        "blocks": len(sealed.seconds),
        "calls": case.calls,
    }


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
