"""Carries out the order for one shard, in this process or in children (python -P -m ... ADDRESS).

An order is JSON. The keys of the shard to write and of the shard to read are sent apart from it. A
child has no other key of the vault.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from sealring import _native
from sealring.errors import BadSource
from sealring.formats.strict import strictly
from sealring.vault.children import Child, serve
from sealring.vault.datasets.fields import Field, encoder
from sealring.vault.datasets.formats import FORMATS, Limits, too_large
from sealring.vault.datasets.shards import SealedShard, ShardReader, Written, write_shard
from sealring.vault.datasets.stages import stage_samples
from sealring.vault.sealed import Progress, SealedPlace
from sealring.vault.storage import LocalPath
from sealring.vault.trees import Watched

_MODULE: Final = "sealring.vault.datasets.work"


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    order: dict[str, Any]
    keys: Sequence[_native.Secret] = field(repr=False)


Run = Callable[[Sequence[Task], Progress], Iterator[tuple[int, Any]]]
"""Carries out tasks in any order, and yields their numbers and results. The first error ends it."""


def in_this_process(tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]:
    for task in tasks:
        yield task.number, carry_out(task.order, task.keys, progress)


class InProcesses:
    """A `Run` in child processes, which start when needed and end with the context."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: list[Child] = []
        self._lock = threading.Lock()

    def __enter__(self) -> InProcesses:
        return self

    def __exit__(self, *others: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def __call__(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]:
        if min(self._count, len(tasks)) <= 1:
            yield from in_this_process(tasks, progress)
            return

        def advance(count: int) -> None:
            with self._lock:
                progress(count)

        def work(task: Task) -> tuple[int, Any]:
            with self._child() as child:
                return task.number, child.ask(task.order, task.keys, advance)

        threads = ThreadPoolExecutor(min(self._count, len(tasks)), "sealring-dataset")
        try:
            for done in as_completed([threads.submit(work, task) for task in tasks]):
                yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def _child(self) -> Iterator[Child]:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child(_MODULE)
        try:
            yield child
        except BaseException:
            child.close()
            raise
        with self._lock:
            self._idle.append(child)


def carry_out(order: dict[str, Any], keys: Sequence[_native.Secret], progress: Progress) -> Any:
    """Carries out an order. The result can be written as JSON."""
    if order["do"] == "digest":
        return _digest(order["unit"], order["format"], Limits(**order["limits"]))
    return asdict(_written(order, keys, progress))


def _digest(unit: dict[str, Any], form: str, limits: Limits) -> str:
    watched = Watched()
    found = FORMATS[form].digest(unit, watched, limits)
    watched.check()
    return found


def _written(order: dict[str, Any], keys: Sequence[_native.Secret], progress: Progress) -> Written:
    place = SealedPlace(**order["place"])
    folder = Path(order["folder"])
    if order["do"] == "ingest":
        watched = Watched()
        limits = Limits(**order["limits"])
        form = FORMATS[order["format"]]
        # Reads the source twice, for its digest and for the samples: `check` finds changes between.
        source = form.digest(order["unit"], watched, limits)
        values = form.samples(order["unit"], watched, limits)
        samples = _encoded(values, order, limits, watched)
        return write_shard(folder, place, keys[0], source, samples, progress)
    given: SealedShard = strictly(SealedShard, order["input"], "an order", "shard")
    reader = ShardReader(LocalPath(order["input_path"]), given, keys[1])
    try:
        if order["do"] == "copy":
            source = reader.shard.source
            return write_shard(folder, place, keys[0], source, reader.samples(), progress)
        made = stage_samples(order["stage"], reader)
        return write_shard(folder, place, keys[0], reader.shard.digest, made, progress)
    finally:
        reader.close()


def _encoded(
    values: Iterator[Any], order: dict[str, Any], limits: Limits, watched: Watched
) -> Iterator[bytes]:
    encode = encoder([Field(**field) for field in order["fields"]])
    where = order["unit"].get("path")
    for number, value in enumerate(values):
        try:
            sample = encode(value)
        except BadSource as problem:
            raise BadSource(f"{where or value.get('path')}: sample {number}: {problem}") from None
        if len(sample) > limits.sample and order["format"] != "tokens":
            what = f"{where or value.get('path')}: sample {number}"
            raise too_large(what, len(sample), limits.sample)
        yield sample
    watched.check()


if __name__ == "__main__":
    serve(sys.argv[1], lambda order, keys, _, progress: carry_out(order, keys, progress))
