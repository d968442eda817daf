"""Cases that end in every wrong way, run by the host as it runs torch's.

python -m tests.conformance.misbehaving
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401

import sealring.core.group.create  # noqa: F401  (imported once, before the forks, as the host does)
from tests.conformance.host import run_cases

SKIP_WITHOUT_CUDA = 75
"""torch's exit status for it."""

LIMIT_S = 10


class Misbehaving:
    """In the place of torch's suite: what a rank does is in the name of the case."""

    world = 2

    @property
    def case_class(self) -> Any:
        return self

    def skip_reason(self, case: str) -> str | None:
        return None

    def meet_in(self, folder: Path) -> None:
        pass

    def _run(self, rank: int, case: str, store: str, pipe: object) -> None:
        getattr(self, case)(rank)
        sys.exit(0)

    def passes(self, rank: int) -> None:
        pass

    def hangs(self, rank: int) -> None:
        if rank == 1:
            time.sleep(3600)

    def ignores_a_hang_of_all(self, rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)

    def dies(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def fails(self, rank: int) -> None:
        if rank == 1:
            raise ValueError("one and one is three")

    def skips_on_all_ranks(self, rank: int) -> None:
        sys.exit(SKIP_WITHOUT_CUDA)

    def skips_on_one_rank(self, rank: int) -> None:
        if rank == 1:
            sys.exit(SKIP_WITHOUT_CUDA)


CASES = [name for name in vars(Misbehaving) if name.split("_")[0] in
         ("passes", "hangs", "ignores", "dies", "fails", "skips")]  # fmt: skip

if __name__ == "__main__":
    run_cases(Misbehaving(), CASES, jobs=2, limit_s=LIMIT_S)  # type: ignore[arg-type]
