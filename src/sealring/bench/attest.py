"""What judging evidence costs: the best of several runs, on evidence of our own making."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sealring.bench.minting.amd import Amd
from sealring.bench.minting.certificates import CHALLENGE, NOW
from sealring.bench.minting.intel import Intel
from sealring.bench.minting.nvidia import Nvidia
from sealring.bench.minting.tpm import Maker
from sealring.identity.attestation import Evidence, Trust, parse_evidence, verify_evidence
from sealring.identity.attestation.evidence import Challenge
from sealring.identity.attestation.nvidia.device import verify_nvidia

_RUNS: Final = 20


def verify_ms(runs: int = _RUNS) -> dict[str, float]:
    """Milliseconds for one piece of evidence of each kind, from the bytes to the verdict.

    A GPU's is its own report alone; its machine's evidence comes on top.
    """
    maker, amd, intel, nvidia = Maker(), Amd(), Intel(), Nvidia()
    nonce = CHALLENGE.device_nonce("snp")
    gpu, known = nvidia.evidence(nonce), nvidia.trust(*nvidia.references())
    return {
        "tpm": _best(runs, _judged(maker.evidence(), maker.challenge(), maker.trust())),
        "snp": _best(runs, _judged(amd.evidence(), CHALLENGE, amd.trust(amd.revocation_list()))),
        "tdx": _best(runs, _judged(intel.evidence(), CHALLENGE, intel.trust(now=NOW))),
        "nvidia": _best(runs, lambda: verify_nvidia(gpu, nonce, known)),
    }


def _judged(evidence: Evidence, challenge: Challenge, trust: Trust) -> Callable[[], object]:
    encoded = evidence.encode()
    return lambda: verify_evidence(parse_evidence(encoded), challenge, trust)


def _best(runs: int, once: Callable[[], object]) -> float:
    """The least that it took: whatever came on top was something else on the machine."""
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        once()
        taken.append(time.perf_counter() - start)
    return round(min(taken) * 1000, 3)
