"""`sealring.tune(model)`: DDP with the planned bucket size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import Question, answer
from sealring.lab.plan.layouts import Precision
from sealring.lab.plan.models import from_module
from sealring.lab.plan.profiles import Profile, load_network, load_profile


def tune(
    module: Any,
    *,
    profile: str | Path | None = None,
    network: str | None = None,
    process_group: Any = None,
    batch: int = 1,
    **options: Any,
) -> Any:
    """`DistributedDataParallel(module, bucket_cap_mb=planned, **options)`.

    Call it where you would wrap the model, after init_process_group, with the same arguments on
    every rank. `profile` is the name of a profile (`sealring plan --list`) or the results.json of
    `sealring bench all` on a machine like this one; a model on a GPU has h200-sealring by default,
    one on CPUs needs its own. `options` are DDP's; a bucket_cap_mb among them is left as it is.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        raise ConfigurationError("call init_process_group first: the plan depends on the world")
    if "bucket_cap_mb" not in options:
        group = process_group if process_group is not None else dist.group.WORLD
        options["bucket_cap_mb"] = planned_bucket_mb(
            module,
            ranks=dist.get_world_size(group),
            per_host=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None,
            profile=profile,
            network=network,
            batch=batch,
        )
    return DistributedDataParallel(module, process_group=process_group, **options)


def planned_bucket_mb(
    module: Any,
    *,
    ranks: int,
    per_host: int | None = None,
    profile: str | Path | None = None,
    network: str | None = None,
    batch: int = 1,
) -> float | None:
    """The bucket_cap_mb with which a sealed step is shortest; None for torch's default."""
    import torch

    model = from_module(module, type(module).__name__)
    first = next(module.parameters())
    if profile is None:
        if first.device.type == "cpu":
            raise ConfigurationError(
                "tune() knows no profile of this machine: measure one with `sealring bench all` "
                "and pass profile='results.json'"
            )
        profile = "h200-sealring"
    known = machine(str(profile), "cpu" if first.device.type == "cpu" else None)
    precision: Precision = "fp32" if first.dtype == torch.float32 else "bf16"
    found = answer(
        Question(
            model,
            known,
            load_network(network or known.network),
            ranks,
            per_host or min(ranks, int(known.device.ranks_per_host.value)),
            batch,
            precision,
        )
    )
    planned = next((each for each in found.ways if each.way == "sealed"), found.ways[0])
    return None if planned.default_buckets else planned.bucket_mb


def machine(name: str, kind: Literal["cpu"] | None = None) -> Profile:
    """A profile by name, from a .toml file, or fitted to a results file: of its GPU, if it has
    measured one and the CPU was not asked for."""
    if name.endswith(".json"):
        from sealring.lab.plan.fit import profile_of
        from sealring.lab.plan.fit_gpu import gpu_of, gpu_profile_of
        from sealring.lab.results import read_results

        results = read_results(Path(name))
        on_gpu = kind is None and gpu_of(results) is not None
        return gpu_profile_of(results) if on_gpu else profile_of(results)
    return load_profile(name)
