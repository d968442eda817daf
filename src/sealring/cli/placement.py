"""Where a launcher stands in its job: what the scheduler that started it says.

Kubeflow's Trainer (PET_*, torchrun's own variables), Slurm (inside srun) and SkyPilot. What the
command line says comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealring.errors import ConfigurationError

PORT: Final = 29400
_PLACES: Final = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "RDZV_ENDPOINT")
"""torchrun's variables that say where a launcher stands, after PET_. One is enough."""


@dataclass(frozen=True, slots=True)
class Placement:
    machines: int = 1
    machine: int = 0
    workers: str = "1"
    """A number, or what torchrun counts by itself: auto, gpu, cpu."""
    endpoint: str | None = None
    """host:port of the first machine."""


def placement(environ: Mapping[str, str]) -> Placement:
    if any(f"PET_{name}" in environ for name in _PLACES):
        return _of_torchrun(environ)
    if "SLURM_STEP_NUM_NODES" in environ:
        return _of_slurm(environ)
    if "SKYPILOT_NODE_RANK" in environ:
        return _of_skypilot(environ)
    return Placement()


def _of_torchrun(environ: Mapping[str, str]) -> Placement:
    machines = environ.get("PET_NNODES", "1")
    least, _, most = machines.partition(":")
    if most not in ("", least):
        raise ConfigurationError(
            f"PET_NNODES is {machines!r}: a job of sealring's has a fixed number of machines"
        )
    endpoint = environ.get("PET_RDZV_ENDPOINT") or None
    if endpoint is None and (host := environ.get("PET_MASTER_ADDR")):
        endpoint = f"{host}:{environ.get('PET_MASTER_PORT', PORT)}"
    return Placement(
        _number("PET_NNODES", least),
        _number("PET_NODE_RANK", environ.get("PET_NODE_RANK", "0")),
        environ.get("PET_NPROC_PER_NODE", "1"),
        endpoint,
    )


def _of_slurm(environ: Mapping[str, str]) -> Placement:
    machines = _number("SLURM_STEP_NUM_NODES", environ["SLURM_STEP_NUM_NODES"])
    if _number("SLURM_STEP_NUM_TASKS", environ.get("SLURM_STEP_NUM_TASKS", "1")) != machines:
        raise ConfigurationError(
            "`sealring run` starts a machine's workers itself: have srun start it once per machine "
            "(--ntasks-per-node=1), and say how many workers with --nproc-per-node"
        )
    # Jobs that share a machine get different ports; all machines of a job compute the same one.
    port = 20000 + _number("SLURM_JOB_ID", environ["SLURM_JOB_ID"]) % 10000
    return Placement(
        machines,
        _number("SLURM_NODEID", environ["SLURM_NODEID"]),
        environ.get("SLURM_GPUS_ON_NODE") or "1",
        f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
    )


def first_host(nodelist: str) -> str:
    """Of Slurm's short form: rack1-node[01-03,07],gpu5 begins with rack1-node01."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if found is None:
        raise ConfigurationError(f"SLURM_STEP_NODELIST is {nodelist!r}, which names no machine")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group())


def _of_skypilot(environ: Mapping[str, str]) -> Placement:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return Placement(
        _number("SKYPILOT_NUM_NODES", environ.get("SKYPILOT_NUM_NODES", str(len(addresses)))),
        _number("SKYPILOT_NODE_RANK", environ["SKYPILOT_NODE_RANK"]),
        environ.get("SKYPILOT_NUM_GPUS_PER_NODE") or "1",
        f"{addresses[0]}:{PORT}" if addresses else None,
    )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigurationError(f"{name} is {value!r}, which is not a number")
    return int(value)
