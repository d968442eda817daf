"""A stand-in for an accelerator, which torchtitan asks for its memory, on a machine without one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


class Cpu:
    """`torch.cpu`, with functions that only `torch.cuda` has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object) -> str:
        return "CPU"

    def get_device_properties(self, device: object) -> SimpleNamespace:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return SimpleNamespace(total_memory=memory)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...
