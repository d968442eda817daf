"""Keeps torch.compile out of the group's own code.

Dynamo compiles every Python function that runs under torch.compile, also those that it reaches
after a graph break. A collective of torch's own backends is C++ and so never traced. Ours is
Python: locks, queues and addresses, which no graph can hold. So Dynamo is told to run it as it is,
and breaks the graph where it does with Gloo.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame


def not_traced(owner: type) -> None:
    """Marks all methods of a class that sealring defines, its bases' included."""
    for base in owner.__mro__:
        if base.__module__.startswith("sealring."):
            for member in vars(base).values():
                for function in _functions_of(member):
                    not_traced_function(function)


def not_traced_function(function: Any) -> None:
    """Dynamo skips the function and all that it calls, and does not inline it elsewhere."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "sealring moves the bytes"


def _functions_of(member: Any) -> list[FunctionType]:
    if isinstance(member, property):
        return [each for each in (member.fget, member.fset) if isinstance(each, FunctionType)]
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return [member] if isinstance(member, FunctionType) else []
