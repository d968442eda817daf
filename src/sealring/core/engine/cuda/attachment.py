"""Attaches one GPU to a group's engine or mailbox. Kernels are compiled when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from sealring import _native
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.cuda import compiler
from sealring.core.engine.cuda.driver import Kernel, can_read_commands
from sealring.core.engine.cuda.kernels import Reduction, definitions
from sealring.errors import Unsupported

_AT_START: Final = (DType.FLOAT32, ReduceKind.SUM)
_MEMORY_MIB: Final = 16
_ON_RECORDS: Final = frozenset({"seal", "open", "open_reduce", "run_one_batch", "run_all_batches"})
_OF_A_REDUCTION: Final = ("open_reduce", "reduce", "average", "premultiply")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The CUDA source to compile, and the suffix of the names of its kernels."""

    text: Callable[[], Mapping[str, bytes]] = compiler.kernel_text
    suffix: str = ""


SHIPPED: Final = Kernels()


class Attachment:
    """A GPU of a group's engine or mailbox.

    Made at the group's first call with a tensor of this GPU, before anything of the tensor is sent.
    """

    def __init__(
        self,
        owner: _native.Endpoint,
        ordinal: int,
        kernels: Kernels | None = None,
        *,
        command_kernel: Literal["run_one_batch", "run_all_batches"] | None = None,
    ) -> None:
        """With `command_kernel`, and if the GPU may read commands from host memory, streams can
        wait.

        `run_one_batch` is the kernel for collectives, `run_all_batches` the one for messages.
        """
        self.ordinal = ordinal
        self._reads_commands = command_kernel is not None and can_read_commands()
        self._text = kernels or SHIPPED
        self._kernels: list[Kernel] = []
        """Kept alive here, because `owner` has only their handles."""
        seal, open_ = self._load(None, ("seal", "open"))
        handle = 0
        if command_kernel and self._reads_commands:
            (handle,) = self._load(None, (command_kernel,), runs_commands=True)
        try:
            owner.attach_cuda(ordinal, seal, open_, handle)
        except RuntimeError as problem:
            raise Unsupported(
                f"cuda:{ordinal} cannot seal: {problem}. A group's collectives and its messages "
                f"each need about {_MEMORY_MIB} MiB of its memory and a working driver: free some, "
                "or use CPU tensors"
            ) from problem

    def _load(
        self, reduction: Reduction | None, names: tuple[str, ...], *, runs_commands: bool = False
    ) -> list[int]:
        defined = definitions(reduction, runs_commands=runs_commands)
        code = compiler.code_for(self.ordinal, defined, self._text.text())
        suffixed = [name + self._text.suffix if name in _ON_RECORDS else name for name in names]
        kernels = [Kernel(code, name) for name in suffixed]
        self._kernels += kernels
        return [kernel.handle for kernel in kernels]


class Gpu(Attachment):
    """A GPU attached to an engine, which also needs the kernels of its reductions."""

    def __init__(
        self,
        engine: _native.Engine,
        ordinal: int,
        kernels: Kernels | None = None,
        *,
        prelaunch: bool = False,
    ) -> None:
        """With `prelaunch`, kernels may be launched before their collective runs."""
        super().__init__(
            engine, ordinal, kernels, command_kernel="run_one_batch" if prelaunch else None
        )
        self._engine = engine
        self._reductions: set[Reduction] = set()
        # A reduction that cannot be compiled fails here, not at the first gradient.
        self.prepare(*_AT_START)

    def has(self, dtype: DType, kind: ReduceKind) -> bool:
        return kind is ReduceKind.NONE or (dtype, kind) in self._reductions

    def prepare(self, dtype: DType, kind: ReduceKind) -> None:
        """Loads a reduction's kernels. Call this before the first collective that uses it."""
        reduction = (dtype, kind)
        if self.has(dtype, kind):
            return
        kernels = self._load(reduction, _OF_A_REDUCTION)
        batches = (
            self._load(reduction, ("run_one_batch",), runs_commands=True)
            if self._reads_commands
            else [0]
        )
        self._engine.add_reduction(dtype, kind, kernels + batches)
        self._reductions.add(reduction)
