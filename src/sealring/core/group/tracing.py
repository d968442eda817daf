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
                if isinstance(member, property):
                    # It tells what the group knows. torch 2.11 reads the group's name in a graph.
                    _not_compiled(member.fget)
                elif isinstance(function := getattr(member, "__func__", member), FunctionType):
                    not_traced_function(function)


def not_traced_function(function: Any) -> None:
    """Dynamo skips the function and all that it calls, and does not inline it elsewhere."""
    _not_compiled(function)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "sealring moves the bytes"


def _not_compiled(function: Any) -> None:
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
