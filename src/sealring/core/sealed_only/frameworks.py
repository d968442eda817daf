"""What a framework moves between processes without torch's groups, closed when it is loaded.

DeepSpeed reduces through shared memory where its operator can be built, or through oneCCL. Without
the operator it calls torch.distributed.all_reduce, which is sealed. torchft makes groups from
torch's classes, and sends states over HTTP unless it is given another transport.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from sealring.core.sealed_only.caller import calling_line
from sealring.core.sealed_only.classes import refuse_method
from sealring.errors import PlaintextGroup


def close_as_they_load() -> None:
    """A second call changes nothing."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, close in _DOORS.items():
            if name in sys.modules:
                close(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        close = _DOORS.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if close else None
        if close is not None and spec is not None and spec.loader is not None:
            _run_after(spec.loader, close)
        return spec


def _run_after(loader: Any, close: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def execute_and_close(module: ModuleType) -> None:
        execute(module)
        close(module)

    loader.exec_module = execute_and_close


def _without_operator(module: Any) -> None:
    """DeepSpeed's own way for machines on which the operator cannot be built."""
    if hasattr(module, "build_shm_op"):
        module.build_shm_op = lambda: None


def _refuse_operators(module: Any) -> None:
    for name in ("ShareMemCommBuilder", "CCLCommBuilder"):
        if (builder := getattr(module, name, None)) is not None:
            builder.load = _refuse


def _refuse(self: Any, *_: Any, **__: Any) -> None:
    raise PlaintextGroup(
        f"{calling_line()} loads DeepSpeed's operator {self.NAME}, which moves tensors in "
        "plaintext, and this job is sealed-only. Use torch.distributed.all_reduce."
    )


def _refuse_classes(*names: str) -> Callable[[Any], None]:
    """torchft's own: a later error would only have its Manager discard every step."""

    def close(module: Any) -> None:
        for name in names:
            if (owner := getattr(module, name, None)) is not None:
                instead = "Use sealring.train.integrations.torchft.sealed_manager"
                refuse_method(owner, "__init__", f"torchft's {name}", instead)

    return close


_DOORS: Final[dict[str, Callable[[ModuleType], None]]] = {
    "deepspeed.comm.torch": _without_operator,
    "deepspeed.ops.op_builder.cpu.comm": _refuse_operators,
    "torchft.checkpointing.http_transport": _refuse_classes("HTTPTransport"),
    "torchft.process_group": _refuse_classes(
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupXCCL",
        "ProcessGroupBabyGloo",
        "ProcessGroupBabyNCCL",
        "ProcessGroupBabyXCCL",
    ),
}
"""By the modules' names."""
