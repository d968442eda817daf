"""Decides which backend serves a group, in the one function by which torch makes all groups."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d

from sealring.core.sealed_only.setting import calling_line, is_required
from sealring.errors import PlaintextGroup, Unsupported

_LOG = logging.getLogger("sealring")

_OURS: Final = "sealring"
_DEVICES: Final = frozenset(("cpu", "cuda"))
_REPLACED: Final = frozenset(
    ("undefined", "gloo", "ucc", "nccl", "nccl2", "nccl-legacy", "nccl-lazy")
)
"""Backends for CPUs and NVIDIA's GPUs, which a sealed group can replace."""
_WITHIN_THE_PROCESS: Final = frozenset(("fake", "threaded"))
"""torch's test backends, which send nothing."""


def watch() -> None:
    """Wraps torch's function that makes groups. Called once, when the backend is registered."""
    torchs: Callable[..., Any] | None = getattr(c10d, "_new_process_group_helper", None)
    if hasattr(torchs, "watched_by_sealring"):
        return
    signature = inspect.signature(torchs) if torchs is not None else None
    if torchs is None or signature is None or "backend" not in signature.parameters:
        if is_required(os.environ):
            raise Unsupported(
                f"torch {torch.__version__} makes process groups in a way that sealed-only mode "
                "does not know: use a torch that the package's metadata names"
            )
        return

    @functools.wraps(torchs)
    def watched(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        call.arguments["backend"] = _backend_for(call.arguments["backend"])
        return torchs(*call.args, **call.kwargs)

    watched.watched_by_sealring = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = watched


def _backend_for(asked: Any) -> Any:
    names = _names_by_device(asked)
    if set(names.values()) == {_OURS}:
        return asked
    if _OURS in names.values() and not names.keys() - _DEVICES:
        # If sealring serves one device of a group, it serves both.
        return c10d.Backend(_OURS)
    if not is_required(os.environ) or set(names.values()) <= _WITHIN_THE_PROCESS:
        return asked
    for device, name in names.items():
        if name not in _REPLACED | {_OURS}:
            raise _refusal(asked, f"sealring cannot do what {name!r} does")
        if device not in _DEVICES | {""}:
            raise _refusal(asked, f"sealring has no tensors on {device}")
    if getattr(c10d, "_use_torchcomms_enabled", lambda: False)():
        raise _refusal(asked, "TorchComms would serve it: unset TORCH_DISTRIBUTED_USE_TORCHCOMMS")
    _LOG.info("sealring serves the group of backend %r asked for at %s", asked, calling_line())
    return c10d.Backend(_OURS)


def _names_by_device(asked: Any) -> dict[str, str]:
    """Parses "cpu:gloo,cuda:nccl" to a name for each device. "gloo" alone has the device ""."""
    text = str(asked or "undefined").lower()
    if ":" not in text:
        return {"": text}
    return {
        device.strip(): name.strip()
        for device, _, name in (part.partition(":") for part in text.split(","))
    }


def _refusal(asked: Any, why: str) -> PlaintextGroup:
    return PlaintextGroup(
        f"{calling_line()} asks for a process group of backend {str(asked)!r}, and this job is "
        f"sealed-only: {why}. Name the backend sealring there, or run the job without "
        "SEALRING_ONLY."
    )


def seal_by_default() -> None:
    """Makes sealring the default backend of its devices, for frameworks that ask torch for it."""
    defaults = c10d.Backend.default_device_backend_map
    for device in _DEVICES & defaults.keys():
        defaults[device] = _OURS


def refuse_existing() -> None:
    for group in c10d._world.pg_map:
        names = _names_by_device(c10d._world.pg_backend_config[group])
        plaintext = set(names.values()) - _WITHIN_THE_PROCESS - {_OURS}
        if plaintext and _OURS not in names.values():
            raise _exists(f"a process group of backend {', '.join(sorted(plaintext))}")
    # Groups made by other code are not in torch's tables. Their threads show that they exist.
    for thread in sorted(_names_of_threads()):
        for start, what in _THREADS.items():
            if thread.startswith(start):
                raise _exists(f"{what}, whose thread {thread} runs,")


_THREADS: Final = {
    "pt_gloo_runloop": "a process group of backend gloo",
    "pt_nccl_": "a process group of backend nccl",
    **dict.fromkeys(
        ("TP_UV_loop", "TP_SHM_reactor", "TP_CMA_loop", "TP_IBV_loop", "TP_IBV_reactor"),
        "an agent of torch.distributed.rpc",
    ),
}
"""Beginnings of the names of threads that exist exactly as long as torch's groups and agents."""


def _names_of_threads() -> set[str]:
    names = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            names.add(os.fsdecode(Path("/proc/self/task", thread, "comm").read_bytes().strip()))
    return names


def _exists(what: str) -> PlaintextGroup:
    return PlaintextGroup(
        f"{what} exists already: call sealring.require_sealed() before the first group is made, or "
        "set SEALRING_ONLY=1"
    )
