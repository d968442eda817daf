"""Runs atheris, a coverage-guided fuzzer, on one target: python -m tests.fuzz.fuzz_hello.

The arguments are libFuzzer's: -max_total_time=30, then folders. New inputs go to the first folder.
"""

from __future__ import annotations

import sys
from typing import Any


def fuzz(target: str) -> None:
    # This is not a dependency of the project; `make fuzz` installs it.
    import atheris

    engine: Any = atheris
    # The targets are watched too, because they state what the native parsers must do.
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
