"""What is done for one shard, in this process or in another: python -P -m ... ADDRESS.

An order is JSON. The keys of the shard to write, and of the shard to read, come apart from it; a
process that carries out orders has no other key of the vault.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sealring import _native
from sealring.errors import BadSource
from sealring.vault.children import serve
from sealring.vault.datasets.fields import Field, encoder
from sealring.vault.datasets.formats import FORMATS
from sealring.vault.datasets.index import Shard
from sealring.vault.datasets.shards import SealedPlace, ShardReader, Written, write_shard
from sealring.vault.datasets.sources import Limits, Watched
from sealring.vault.datasets.stages import stage_samples
from sealring.vault.storage import LocalPath

Progress = Callable[[int], None]


def carry_out(order: dict[str, Any], keys: Sequence[_native.Secret], progress: Progress) -> Any:
    """Does what the order says; its result is JSON."""
    if order["do"] == "digest":
        return _digest(order["unit"], order["format"], Limits(**order["limits"]))
    made = _written(order, keys, progress)
    return dataclasses.asdict(made)


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
        # First what it is made from, then the samples: `check` sees a change in between.
        source = form.digest(order["unit"], watched, limits)
        values = form.samples(order["unit"], watched, limits)
        samples = _encoded(values, order, limits, watched)
        return write_shard(folder, place, keys[0], source, samples, progress)
    reader = _reader(order["input"], keys[1])
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
            raise BadSource(
                f"{where or value.get('path')}: sample {number} has {len(sample)} bytes, and the "
                f"limit is {limits.sample}: if it is meant, set a larger --largest-sample"
            )
        yield sample
    watched.check()


def _reader(given: dict[str, Any], key: _native.Secret) -> ShardReader:
    place, shard = SealedPlace(**given["place"]), Shard(**given["shard"])
    path = LocalPath(given["path"])
    return ShardReader(path, place, key, given["commitment"], shard, given["whose"])


if __name__ == "__main__":
    serve(sys.argv[1], carry_out)
