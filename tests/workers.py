"""Worker processes that are started once and reused, which makes multi-process tests cheap.

A test passes a module-level function. Every worker calls it as fn(rank, world, *arguments), and the
results are returned in the order of ranks. Workers keep their process group for later calls that
ask for the same one; a call that fails ends its group.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from sealring.lab.bench.workers import forking_context, meeting_place

SECRET = "2d34b815872b8b5c963b6e4525cd9a63516cf180021473137f1e82952abe18e0"


class RemoteError(Exception):
    """A worker's exception that the test did not ask for; it shows the traceback."""


class Workers:
    def __init__(self, count: int) -> None:
        self._count = count
        self._context = forking_context()
        self._stack = ExitStack()
        self._start()

    def _start(self) -> None:
        context = self._context
        self._current: object = None
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for index in range(self._count):
            here, there = context.Pipe()
            process = context.Process(target=_loop, args=(there,), name=f"worker-{index}")
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(
        self,
        fn: Callable[..., Any],
        *arguments: Any,
        world: int = 2,
        group: bool = True,
        env: Mapping[str, str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        errors: bool = False,
    ) -> list[Any]:
        """Returns fn's results by rank; with errors=True, exceptions are results and not raised.

        With group=False, fn makes its own group; the environment is set for
        dist.init_process_group.
        """
        shared = {
            # Every call has its own store, whatever earlier calls left in theirs.
            **self._stack.enter_context(meeting_place()),
            "WORLD_SIZE": str(world),
            "SEALRING_SECRET": SECRET,
            "SEALRING_JOB": "tests",
            **(env or {}),
        }
        wanted = (world, tuple(sorted((env or {}).items()))) if group and not rank_env else None
        # This is decided here for all workers: one that missed a change would trust its old group.
        reuse = wanted is not None and wanted == self._current
        try:
            for rank in range(world):
                own = {**shared, "RANK": str(rank), **(rank_env or {}).get(rank, {})}
                self._pipes[rank].send((fn, arguments, rank, world, own, group, reuse))
            results = [self._result(rank) for rank in range(world)]
        except BaseException:
            # The test ran out of time. Its workers still run and would answer the next test's call.
            self._end(patience_s=0)
            self._start()
            raise
        if any(kind == "ended" for kind, _, _ in results):
            self._end(patience_s=0)
            self._start()
        self._current = wanted if all(kind == "value" for kind, _, _ in results) else None
        if not errors:
            for kind, _, text in results:
                if kind != "value":
                    raise RemoteError(text)
        return [value for _, value, _ in results]

    def _result(self, rank: int) -> tuple[str, Any, str]:
        try:
            result: tuple[str, Any, str] = self._pipes[rank].recv()
        except EOFError:
            return "ended", None, f"worker {rank} ended"
        return result

    def close(self) -> None:
        self._end(patience_s=10)
        self._stack.close()

    def _end(self, *, patience_s: float) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()


def _travels(error: BaseException) -> bool:
    try:
        pickle.dumps(error)
    except Exception:
        return False
    return True


def _loop(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    before = dict(os.environ)
    while (order := pipe.recv()) is not None:
        fn, arguments, rank, world, env, group, reuse = order
        try:
            if not reuse:
                if dist.is_initialized():
                    dist.destroy_process_group()
                # torch names groups by a counter, which a failed init leaves raised. Workers
                # without that failure would then wait under another name.
                dist.distributed_c10d._world.group_count = 0
                os.environ.clear()
                os.environ.update({**before, **env})
                if group:
                    dist.init_process_group("sealring")
            pipe.send(("value", fn(rank, world, *arguments), ""))
        except BaseException as error:
            with suppress(Exception):
                dist.destroy_process_group()
            text = traceback.format_exc()
            # Some errors cannot be pickled, for instance pytest's own outcomes.
            pipe.send(("error", error if _travels(error) else RemoteError(text), text))
        if not group and dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
