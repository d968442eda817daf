"""Runs one framework's script on Gloo and sealed, and compares what it computed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SCRIPTS: Final = Path(__file__).parent / "scripts"
FRAMEWORKS: Final = {
    "plain": "torch",
    "accelerated": "accelerate",
    "trainer": "transformers",
    "lightning_ddp": "lightning",
    "fabric": "lightning",
}
"""Scripts, and the distribution that each needs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    script: str
    framework: str
    version: str
    groups: list[str]
    """The classes of all process groups that existed at the end of the sealed run."""
    difference: float
    """The largest, of losses and of the sum of all weights."""


def version_of(framework: str) -> str | None:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare(script: str) -> Comparison:
    framework = FRAMEWORKS[script]
    plain = _run([sys.executable, "-m", "torch.distributed.run", "--standalone"], script)
    sealed = _run([sys.executable, "-m", "sealring.cli", "run"], script)
    pairs = zip(
        [*plain["losses"], plain["checksum"]], [*sealed["losses"], sealed["checksum"]], strict=True
    )
    version = version_of(framework)
    assert version is not None
    return Comparison(
        script, framework, version, sealed["groups"], max(abs(one - two) for one, two in pairs)
    )


def _run(launcher: list[str], script: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(SCRIPTS / f"{script}.py")],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))
