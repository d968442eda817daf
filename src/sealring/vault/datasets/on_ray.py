"""Carries out the orders for shards on a Ray cluster, as a Ray Data job.

Ray writes what it sends to its object store and log, so it is given no key. Each Ray worker opens
the vault itself: with the key file at the same path on its machine, or by attesting to the broker.
The vault's directory and the source must have the same paths on all machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sealring import _native
from sealring.errors import ConfigurationError
from sealring.formats.strict import read_json
from sealring.vault import keys, objects
from sealring.vault.children import answer_of, result_of
from sealring.vault.datasets.work import Task, carry_out
from sealring.vault.storage import LocalPath
from sealring.vault.vault import Vault


@dataclass(frozen=True, slots=True)
class VaultReference:
    """Where a vault is and what opens it, without any secret."""

    path: str
    id: str
    key: str | None
    broker: str | None

    def open(self) -> Vault:
        if self.broker is not None:
            opener = keys.released_key(self.broker)
        elif self.key is not None:
            opener = keys.key_file(Path(self.key))
        else:
            raise ConfigurationError("--engine ray opens the vault with --key or --broker")
        return Vault.open(Path(self.path), opener, self.id)


class OnRay:
    """A `Run` on the Ray cluster at RAY_ADDRESS; starts one on this machine if that is not set."""

    def __init__(self, vault: VaultReference) -> None:
        self._vault = vault
        try:
            self._ray = import_module("ray")
            self._data = import_module("ray.data")
        except ImportError:
            raise ConfigurationError(
                "--engine ray needs Ray: install the extra, pip install 'sealring[ray]'",
                code="configuration.missing_extra",
            ) from None

    def __enter__(self) -> OnRay:
        if not self._ray.is_initialized():
            self._ray.init(
                address=os.environ.get("RAY_ADDRESS"), include_dashboard=None, log_to_driver=False
            )
        self._data.DataContext.get_current().enable_progress_bars = False
        return self

    def __exit__(self, *others: object) -> None:
        self._ray.shutdown()

    def __call__(
        self, tasks: Sequence[Task], progress: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        if not tasks:
            return
        rows = [{"number": task.number, "order": json.dumps(task.order)} for task in tasks]
        work = self._data.from_items(rows, override_num_blocks=len(rows))
        for row in work.map(partial(_carry_out, self._vault)).iter_rows():
            answer = read_json(row["answer"])
            result = result_of(answer)
            progress(answer["bytes"])
            yield row["number"], result


def _carry_out(vault: VaultReference, row: dict[str, Any]) -> dict[str, Any]:
    """Runs in a Ray worker: carries out one order."""
    order = read_json(row["order"])
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more

    answer = answer_of(lambda: carry_out(order, _keys(vault, order), count))
    return {"number": row["number"], "answer": json.dumps(answer | {"bytes": done})}


def _keys(reference: VaultReference, order: dict[str, Any]) -> list[_native.Secret]:
    folders = [order["folder"]] if "folder" in order else []
    parts = [order["part"]]
    if "input" in order:
        path = Path(order["input_path"])
        folders.append(str(path.parent))
        parts.append(path.name)
    if not folders:
        return []
    vault = _opened(reference)
    vault.refresh()
    found = []
    for folder, part in zip(folders, parts, strict=True):
        copy = objects.open_copy(LocalPath(folder), vault.ring, vault.header.vault)
        found.append(copy.place.part_key(part))
    return found


@lru_cache(maxsize=1)
def _opened(reference: VaultReference) -> Vault:
    """Opens the vault once in a process, so that a worker attests only once."""
    return reference.open()
