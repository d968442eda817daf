"""torch's own backend tests, taken from the installed wheel as they are.

Many of them carry decorators that ask for the backend's name while the module is imported, and
skip themselves for a name they do not know. So the module is imported under the name of a backend
that has what sealring has: the decorators then take the same cases as for that one. Afterwards the
name is set to the backend's own, and that is what every test passes to init_process_group.
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

LIKE = "gloo"
"""Serves CPU tensors, as sealring does; what applies to it applies to us."""
LIKE_FOR_ALL_TO_ALL = "mpi"
"""The one that torch tests all_to_all of CPU tensors with."""


class Suite:
    def __init__(self, backend: str, world: int, like: str = LIKE) -> None:
        # Read by the module while it is imported. A GPU that is visible would make every case skip
        # itself on a machine with fewer GPUs than ranks.
        os.environ.update(
            BACKEND=like,
            WORLD_SIZE=str(world),
            # A case that makes its default group anew wants a file to meet in; meet_in names it.
            INIT_METHOD="file://",
            CUDA_VISIBLE_DEVICES="",
            MASTER_ADDR="127.0.0.1",
        )
        from torch.testing._internal.distributed import distributed_test

        self.world = world
        self.backend = backend
        self._module = distributed_test
        self._name_backend(distributed_test, backend)
        self.case_class = _case_class(distributed_test, backend)

    def _name_backend(self, module: ModuleType, backend: str) -> None:
        module.BACKEND = backend  # type: ignore[attr-defined]
        os.environ["BACKEND"] = backend
        for backends in module.DistTestCases.backend_feature.values():
            if LIKE in backends:
                backends.add(backend)

    def meet_in(self, folder: Path) -> None:
        """Called in a rank: where the harness and the cases put their files."""
        os.environ["TEMP_DIR"] = str(folder)
        self._module.INIT_METHOD = f"file://{folder}/second_store"

    def cases(self) -> list[str]:
        return list(unittest.defaultTestLoader.getTestCaseNames(self.case_class))

    def skip_reason(self, case: str) -> str | None:
        """Of a case that unittest itself would not run: decided when its module was imported."""
        test = getattr(self.case_class, case)
        if not getattr(test, "__unittest_skip__", False):
            return None
        return str(test.__unittest_skip_why__)


def _case_class(module: Any, backend: str) -> Any:
    from tests.conformance import evidence

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, *arguments: Any, **options: Any) -> None:
            # The harness's own meeting of the ranks through files, before and after a test. Ten
            # seconds are torch's patience; a loaded machine needs more, and the case has a limit.
            if not arguments:
                options.setdefault("timeout", 120)
            super()._barrier(*arguments, **options)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            if backend == "sealring":
                evidence.check_default_group()
            super().run_test(test_name, parent_pipe)

        def _test_accumulate_gradients_no_sync(self, *arguments: Any, **options: Any) -> None:
            # Asks for the name once more, to learn whether tensors live on the CPU. Its group is
            # made by now.
            module.BACKEND = LIKE
            super()._test_accumulate_gradients_no_sync(*arguments, **options)

    return Case
