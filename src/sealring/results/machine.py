"""What this machine is, as far as it explains a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

from sealring.results.schema import Machine
from sealring.version import __version__

_FEATURES: Final = (
    "aes", "pmull", "sha2", "sve", "sve2", "vaes", "vpclmulqdq", "avx2", "avx512f", "amx_tile"
)  # fmt: skip


def this_machine() -> Machine:
    from sealring import _native

    info = _cpu_info()
    gpus = _gpus()
    flags = set(info.get("flags", info.get("Features", "")).split())
    return Machine(
        architecture=platform.machine(),
        cpu=info.get("model name") or _arm_name(info) or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        features=[name for name in _FEATURES if name in flags],
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=[name for name, _ in gpus],
        gpu_memory_bytes=min((memory for _, memory in gpus), default=0),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        openssl=_native.openssl_version(),
        sealring=__version__,
    )


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


_ARM_PARTS: Final = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}
"""Arm's kernels give numbers where x86 gives a name (MIDR_EL1: implementer and part)."""


def _arm_name(info: dict[str, str]) -> str | None:
    implementer, part = info.get("CPU implementer"), info.get("CPU part")
    if implementer is None or part is None:
        return None
    known = _ARM_PARTS.get((implementer, part))
    return known or f"implementer {implementer}, part {part}"


def _gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each."""
    import torch

    if not torch.cuda.is_available():
        return []
    all_ = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in all_]
