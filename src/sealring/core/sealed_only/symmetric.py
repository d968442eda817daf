"""Symmetric memory: torch's way to the memory of peers, which nothing seals.

It is refused for every group in sealed-only mode, and for sealed groups always: torch reaches peers
in C++ without asking the group's backend, and may end the process where that is not torch's own.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d

from sealring.core.sealed_only.caller import calling_line
from sealring.core.sealed_only.setting import is_on
from sealring.errors import PlaintextGroup, Unsupported

_NAMESPACE: Final = "symm_mem"
_METHODS: Final = ("rendezvous", "empty_strided_p2p")
_INSTEAD: Final = "Use collectives: peers cannot read this process's memory."
_operators: Any = None
"""Keeps the checks registered."""


def watch() -> None:
    """Checks every use from now on; a second call changes nothing."""
    global _operators
    symmetric: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    if _operators is not None or symmetric is None:
        return
    torchs: Any = torch._C
    library: Any = torch.library
    _operators = library.Library(_NAMESPACE, "IMPL")
    for full_name in torchs._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == _NAMESPACE:
            # BackendSelect comes before the kernels of every device, with gradients or without.
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
