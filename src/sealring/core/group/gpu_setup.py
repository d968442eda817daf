"""A group's first call with a GPU: all ranks agree on the way between their GPUs.

Every rank does this in its own first call, before it chooses anything for that call: the best
algorithm and the cut of the tensors depend on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.group.completions import driver_calls
from sealring.core.group.gpu import GpuCalls
from sealring.core.schedule import Selection
from sealring.errors import Unsupported


class GpuSetup:
    def __init__(self, engine: CollectiveEngine, gpu: GpuCalls, wanted: Wire) -> None:
        self._engine = engine
        self._gpu = gpu
        self._wanted = wanted
        self._done = False
        self._refused: Unsupported | None = None
        self._lock = threading.Lock()
        """The script's thread and its backward pass's may both come with a first tensor."""
        self._choices: tuple[Selection, Selection] | None = None

    def ensure_done(
        self,
        device: torch.device,
        run: Callable[[Iterable[Collective]], None],
        timeout_s: float,
    ) -> None:
        if self._done:
            return
        with self._lock, driver_calls.counted():
            if self._done:
                return
            if self._refused is not None:
                raise self._refused
            problem = gpu = ""
            try:
                self._gpu.attach(device)
                gpu = self._gpu.name_of(device)
            except Exception as unable:  # whatever it is, the others must not wait for this rank
                problem = str(unable) or repr(unable)
            try:
                run(self._engine.agree_on_wire(self._wanted, problem, gpu, timeout_s))
            except Unsupported as refusal:
                self._refused = refusal  # all ranks have it, and need not ask again
                raise
            self._done = True

    def ensure_linked(
        self,
        collective: Collective,
        run: Callable[[Iterable[Collective]], None],
        timeout_s: float,
    ) -> None:
        """Makes ready what the collective's program needs before GPUs run it, once per program."""
        if self._engine.gpus_lack_links(collective):
            with driver_calls.counted(), self._engine.no_launches_ahead():
                run(self._engine.link_gpus(collective, timeout_s))

    def selection(self, chosen: Selection) -> Selection:
        """The group's own choice, as the way between the GPUs allows it."""
        if not self._engine.wired:
            return chosen
        if self._choices is None or self._choices[0] is not chosen:
            self._choices = (chosen, chosen.without_forwards())
        return self._choices[1]
