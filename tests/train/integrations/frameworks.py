"""Runs one framework's script on Gloo and sealed, and compares the results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
SCRIPTS: Final = Path(__file__).parent / "scripts"
ON_CPU: Final = os.environ.get("INTEGRATIONS_DEVICE", "cpu") == "cpu"
TOLERANCE: Final = 0.0 if ON_CPU else 1e-6
"""On GPUs, frameworks let NCCL average, but divide a sum themselves with other backends."""
LIMIT_S: Final = 240
"""The limit for one script; an idle machine needs only seconds for each."""


class FrameworkFailed(Exception):
    """A script failed or took too long; the error shows the end of its output."""


@dataclass(frozen=True, slots=True)
class Case:
    script: str
    framework: str
    """The distribution that the case needs."""
    arguments: tuple[str, ...] = ()
    starts_workers: bool = False
    """The framework starts the workers itself, so there is no launcher."""


CASES: Final = {
    "plain": Case("plain", "torch"),
    "nanogpt": Case("nanogpt", "torch"),
    "accelerate": Case("accelerated", "accelerate"),
    "trainer": Case("trainer", "transformers"),
    "lightning_ddp": Case("lightning_ddp", "lightning"),
    "fabric": Case("fabric", "lightning"),
    "deepspeed_zero1": Case("deepspeed_zero", "deepspeed", ("1",)),
    "deepspeed_zero2": Case("deepspeed_zero", "deepspeed", ("2",)),
    "deepspeed_zero3": Case("deepspeed_zero", "deepspeed", ("3",)),
    "ray_train": Case("ray_train", "ray", starts_workers=True),
    "torchtitan": Case("titan", "torchtitan"),
    "torchft": Case("replicas", "torchft", starts_workers=True),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    version: str
    groups: list[str]
    """The classes of all process groups that existed at the end of the sealed run."""
    difference: float
    """The largest difference of the losses and of the sum of all weights."""
    seconds: float
    """How long both runs took together."""


def version_of(framework: str) -> str | None:
    for name in (framework, f"{framework}-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def compare(name: str) -> Comparison:
    case = CASES[name]
    began = time.monotonic()
    plain, sealed = _run(case, sealed=False), _run(case, sealed=True)
    pairs = zip(
        [*plain["losses"], plain["checksum"]], [*sealed["losses"], sealed["checksum"]], strict=True
    )
    version = version_of(case.framework)
    assert version is not None
    difference = max(abs(one - two) for one, two in pairs)
    return Comparison(version, sealed["groups"], difference, time.monotonic() - began)


def _run(case: Case, *, sealed: bool) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    environ = {
        **clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable]
    if not case.starts_workers:
        command += ["-m", *(["sealring.cli", "run"] if sealed else
                            ["torch.distributed.run", "--standalone"]),
                    "--nproc-per-node", "2"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if case.starts_workers and sealed:
            secret = Path(folder) / "job.secret"
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(32))
            environ |= {"SEALRING_ONLY": "1", "SEALRING_SECRET_FILE": str(secret)}
        printed = output_of(
            [*command, str(SCRIPTS / f"{case.script}.py"), *case.arguments], environ, folder
        )
    (line,) = (each for each in printed.splitlines() if each.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def output_of(command: list[str], environ: dict[str, str], folder: str) -> str:
    with subprocess.Popen(
        command, env=environ, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            printed, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            # On SIGTERM a launcher ends its workers; a killed one would leave them.
            process.terminate()
            _, errors = process.communicate(timeout=60)
            raise FrameworkFailed(f"not done in {LIMIT_S} s: {errors[-2000:]}") from None
    if process.returncode != 0:
        raise FrameworkFailed(f"exit code {process.returncode}: {errors[-4000:]}")
    return printed
