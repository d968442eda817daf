"""One rank of one case: a fork of the host, in which torch is already imported."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from tests.conformance import evidence
from tests.conformance.suite import Suite

_PR_SET_PDEATHSIG = 1


def run_rank(suite: Suite, case: str, rank: int, folder: Path) -> NoReturn:
    """Never returns into the host's code: a fork that did would be a second host."""
    code = 1
    try:
        # A session of its own, so that the host can end what a test itself started.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _write_output_to(folder / f"rank{rank}.log")
        suite.meet_in(folder)
        code = _run_test(suite, case, rank, folder)
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(evidence.collected())))
        # What an ordinary exit would do: a group that cannot leave is part of the test.
        atexit._run_exitfuncs()
    except BaseException:
        code = code or 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_output_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The host asks a rank that hangs where it is.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # torch says only in its log why a test skipped itself.
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)


def _run_test(suite: Suite, case: str, rank: int, folder: Path) -> int:
    import torch.multiprocessing

    evidence.watch_groups()
    _kept, pipe = torch.multiprocessing.Pipe()
    try:
        suite.case_class._run(rank, case, str(folder / "store"), pipe)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
