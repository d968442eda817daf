"""Lets atheris (coverage-guided, libFuzzer's) loose on one target: python -m tests.fuzz.fuzz_hello.

Arguments are libFuzzer's: -max_total_time=30, then folders; what it finds goes to the first one.
"""

from __future__ import annotations

import sys
from typing import Any


def fuzz(target: str) -> None:
    # Not a dependency of the project: `make fuzz` installs it.
    import atheris

    engine: Any = atheris
    # The targets too: they spell out what the native parsers must do, branch by branch.
    watched = ["engine", "handshake", "identity.attestation", "links", "provenance", "store"]
    modules = [
        *(f"sealring.{name}" for name in watched),
        "tests.fuzz.targets",
        "tests.fuzz.log_targets",
        "json",
    ]
    with engine.instrument_imports(include=modules):
        from tests.fuzz.targets import TARGETS
    engine.Setup(sys.argv, TARGETS[target])
    engine.Fuzz()
