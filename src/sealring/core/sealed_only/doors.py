"""Refuses what torch can construct without making a group first, because none of it is sealed."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d

from sealring.core.sealed_only.setting import calling_line, is_on
from sealring.errors import PlaintextGroup, Unsupported

_GROUPS: Final = (
    "ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupMPI",
    "ProcessGroupUCC", "ProcessGroupXCCL",
)  # fmt: skip


def refuse_all() -> None:
    distributed: Any = torch._C._distributed_c10d
    for name in _GROUPS:
        if (group := getattr(distributed, name, None)) is not None:
            instead = "Make the group with torch.distributed.new_group, or sealring.create_group"
            refuse_method(group, "__init__", name, instead)
            refuse_method(group, "create", name, instead)
    watch_symmetric_memory()
    rpc: Any = getattr(torch._C, "_distributed_rpc", None)
    if (agent := getattr(rpc, "TensorPipeAgent", None)) is not None:
        instead = "Use send, recv and the object collectives of torch.distributed"
        refuse_method(agent, "__init__", "torch.distributed.rpc", instead)


def refuse_method(owner: Any, method: str, what: str, instead: str) -> None:
    """Makes every later call of the method raise PlaintextGroup. Calling this twice is harmless."""
    torchs = getattr(owner, method, None)
    if torchs is None or hasattr(torchs, "refused_by_sealring"):
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise PlaintextGroup(
            f"{calling_line()} uses {what}, which is not sealed, and this job is sealed-only. "
            f"{instead}."
        )

    refuse.refused_by_sealring = True  # type: ignore[attr-defined]
    setattr(owner, method, refuse if method == "__init__" else staticmethod(refuse))


_NAMESPACE: Final = "symm_mem"
_METHODS: Final = ("rendezvous", "empty_strided_p2p")
_INSTEAD: Final = "Use collectives: peers cannot read this process's memory."
_operators: Any = None
"""The library object that keeps the checks registered."""


def watch_symmetric_memory() -> None:
    """Checks every later use of symmetric memory. Calling this twice is harmless."""
    global _operators
    symmetric: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    if _operators is not None or symmetric is None:
        return
    torchs: Any = torch._C
    library: Any = torch.library
    _operators = library.Library(_NAMESPACE, "IMPL")
    for full_name in torchs._dispatch_get_all_op_names():
        if full_name.startswith(f"{_NAMESPACE}::"):
            name = full_name.removeprefix(f"{_NAMESPACE}::")
            # BackendSelect comes before the kernels of all devices, with or without gradients.
            _operators.impl(name, _checked_operator(name), "BackendSelect", with_keyset=True)
    for name in _METHODS:
        if (method := getattr(symmetric, name, None)) is not None:
            setattr(symmetric, name, staticmethod(_checked_method(name, method)))


def _checked_operator(full_name: str) -> Any:
    name, _, overload = full_name.partition(".")

    def check(keys: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_unsealed(f"torch.ops.{_NAMESPACE}.{name}", arguments, options)
        torchs: Any = torch._C
        later = torchs._dispatch_keyset_full_after(torchs.DispatchKey.BackendSelect)
        operator = getattr(getattr(torch.ops.symm_mem, name), overload or "default")
        return operator.redispatch(keys & later, *arguments, **options)

    return check


def _checked_method(name: str, torchs: Any) -> Any:
    @functools.wraps(torchs)
    def check(*arguments: Any, **options: Any) -> Any:
        _refuse_unsealed(f"symmetric memory ({name})", arguments, options)
        return torchs(*arguments, **options)

    return check


def _refuse_unsealed(what: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    if is_on():
        raise PlaintextGroup(
            f"{calling_line()} uses {what}, which is not sealed, and this job is sealed-only. "
            f"{_INSTEAD}"
        )
    for each in (*arguments, *options.values()):
        if isinstance(each, str) and _is_sealed(each):
            raise Unsupported(
                f"{calling_line()} uses {what} with a sealed group, and symmetric memory is not "
                f"sealed. {_INSTEAD}"
            )


def _is_sealed(name: str) -> bool:
    return any(
        name == group_name and "sealring" in c10d._world.pg_backend_config[group]
        for group, group_name in c10d._world.pg_names.items()
    )


def close_as_they_load() -> None:
    """Refuses frameworks' plaintext ways when their modules are loaded. Twice is harmless."""
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
    """Makes DeepSpeed do without the operator, as on machines where it cannot be built."""
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
    """Refuses torchft's classes at construction: later, its Manager would only discard each
    step."""

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
"""What to do when a module of this name has been loaded."""
