"""The measured table: which algorithm for which size, world and topology.

Its file is TOML, as `python -m sealring.lab algorithms --table` writes it:

    [[all_reduce]]
    hosts = "one"                      # a Placement
    ranks = 4                          # from so many ranks on, up to the next entry's
    up_to_bytes = [32768]              # the first algorithm up to here,
    algorithms = ["direct", "ring"]    # the next one beyond

Bytes are those of one rank's message: the tensor in an all-reduce, a reduce or a broadcast, one
rank's part in an all-gather (its input) or a reduce-scatter (its output).
"""

from __future__ import annotations

import hashlib
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, Final, NamedTuple

from sealring.core.schedule.build import ALGORITHMS
from sealring.core.schedule.hierarchical import Topology
from sealring.core.schedule.program import Algorithm, Operation
from sealring.errors import ConfigurationError

SHIPPED: Final = "algorithms.toml"
ABOUT: Final = "measured"
"""The one key of a file that is no operation: on what it was measured, for people to read."""
_MOST_RANKS: Final = 1 << 20
_MOST_BYTES: Final = 1 << 50

OPERATIONS: Final = {
    operation.name.lower(): operation
    for operation in Operation
    if len(ALGORITHMS[operation]) > 1 and operation is not Operation.BARRIER
}
"""Those where there is something to choose by the bytes, by name."""
ALGORITHM_NAMES: Final = {algorithm.name.lower(): algorithm for algorithm in Algorithm}


class Placement(StrEnum):
    """What of a topology decides: over which kind of link neighbours talk."""

    ONE = "one"
    """All ranks on one host."""
    ONE_RANK_EACH = "one_rank_each"
    """Every rank on a host of its own."""
    SEVERAL = "several"
    """More than one host, and one of them with more than one rank."""

    @classmethod
    def of(cls, topology: Topology) -> Placement:
        hosts = len(set(topology.host_of))
        if hosts == 1:
            return cls.ONE
        return cls.ONE_RANK_EACH if hosts == len(topology.host_of) else cls.SEVERAL


class Row(NamedTuple):
    """What is best in worlds from `ranks` on."""

    ranks: int
    up_to_bytes: tuple[int, ...]
    algorithms: tuple[Algorithm, ...]
    """One more than limits: the last one is for all that is longer."""

    def at(self, nbytes: int) -> Algorithm:
        return self.algorithms[bisect_left(self.up_to_bytes, nbytes)]


ALWAYS_DIRECT: Final = Row(1, (), (Algorithm.DIRECT,))

Key = tuple[Operation, Placement]


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    rows: Mapping[Key, tuple[Row, ...]]
    """By rising numbers of ranks."""

    def row(self, operation: Operation, placement: Placement, world: int) -> Row:
        """The row for a world: of those that begin no later, the last; in smaller worlds the first.

        Where there is nothing to choose, there is no row: what has one receiver is sent there.
        """
        if operation not in OPERATIONS.values():
            return Row(1, (), ALGORITHMS[operation][:1])
        rows = self.rows.get((operation, placement), ()) or (ALWAYS_DIRECT,)
        begun = [row for row in rows if row.ranks <= world]
        return begun[-1] if begun else rows[0]

    def digest(self) -> int:
        """48 bits that ranks compare before they form a group."""
        described = repr(
            sorted(
                (operation.name, placement.value, row.ranks, row.up_to_bytes, names(row.algorithms))
                for (operation, placement), rows in self.rows.items()
                for row in rows
            )
        )
        return int.from_bytes(hashlib.sha256(described.encode()).digest()[:6], "big")

    def __hash__(self) -> int:
        return hash(frozenset(self.rows.items()))

    def fixed_to(self, fixed: Mapping[Operation, Algorithm]) -> AlgorithmTable:
        """This table, with one algorithm for everything where `fixed` names one."""
        rows = {
            (operation, placement): (Row(1, (), (algorithm,)),)
            for operation, algorithm in fixed.items()
            for placement in Placement
            if operation in OPERATIONS.values()
        }
        return AlgorithmTable(rows).over(self)

    def over(self, below: AlgorithmTable) -> AlgorithmTable:
        """This table, and the other one where this one says nothing of an operation and placement.

        A file that has been measured on one host leaves the choice between hosts as it was.
        """
        return AlgorithmTable({**below.rows, **self.rows})


@cache
def shipped_table() -> AlgorithmTable:
    """The one that comes with sealring; docs/algorithms.md says how it was measured."""
    text = resources.files("sealring.core.schedule").joinpath(SHIPPED).read_text()
    return parse_table(text, SHIPPED)


def parse_table(text: str, name: str) -> AlgorithmTable:
    """What a file says; ConfigurationError, naming the file and the entry, if it is no table."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigurationError(f"{name} is not TOML: {problem}") from None
    rows: dict[Key, list[Row]] = {}
    for word, entries in document.items():
        if word == ABOUT:
            continue
        if word not in OPERATIONS:
            raise ConfigurationError(
                f"{name}: {word[:40]!r} is not an operation that has a choice; there is "
                f"{', '.join(OPERATIONS)}"
            )
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise ConfigurationError(f"{name}: {word} must be a list of entries, [[{word}]]")
        for number, entry in enumerate(entries, 1):
            where = f"{name}: entry {number} of {word}"
            placement, row = _row(OPERATIONS[word], entry, where)
            above = rows.setdefault((OPERATIONS[word], placement), [])
            if above and above[-1].ranks >= row.ranks:
                raise ConfigurationError(
                    f"{where}: ranks must rise from one entry with hosts = {placement.value!r} to "
                    "the next"
                )
            above.append(row)
    return AlgorithmTable({key: tuple(each) for key, each in rows.items()})


_FIELDS: Final = {"hosts", "ranks", "up_to_bytes", "algorithms"}


def _row(operation: Operation, entry: dict[str, Any], where: str) -> tuple[Placement, Row]:
    if entry.keys() != _FIELDS:
        raise ConfigurationError(f"{where} must have {', '.join(sorted(_FIELDS))} and nothing else")
    hosts, ranks, limits, chosen = (
        entry[field] for field in ("hosts", "ranks", "up_to_bytes", "algorithms")
    )
    if hosts not in list(Placement):
        raise ConfigurationError(f"{where}: hosts must be one of {', '.join(Placement)}")
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise ConfigurationError(f"{where}: ranks must be a number from 1 to {_MOST_RANKS}")
    if not _is_list(limits, int) or any(not 0 <= limit <= _MOST_BYTES for limit in limits):
        raise ConfigurationError(f"{where}: up_to_bytes must be a list of numbers of bytes")
    if any(one >= other for one, other in pairwise(limits)):
        raise ConfigurationError(f"{where}: up_to_bytes must rise")
    allowed = names(ALGORITHMS[operation])
    if not _is_list(chosen, str) or not set(chosen) <= set(allowed):
        raise ConfigurationError(f"{where}: algorithms must be some of {', '.join(allowed)}")
    if len(chosen) != len(limits) + 1:
        raise ConfigurationError(
            f"{where}: {len(limits)} limits in up_to_bytes need {len(limits) + 1} algorithms, not "
            f"{len(chosen)}"
        )
    algorithms = tuple(ALGORITHM_NAMES[each] for each in chosen)
    return Placement(hosts), Row(ranks, tuple(limits), algorithms)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def format_table(table: AlgorithmTable, about: Mapping[str, str]) -> str:
    """The file that parse_table reads back as this table; `about` says what was measured, on what.

    The values of `about` are printable and hold neither quotes nor backslashes.
    """
    lines = [f"[{ABOUT}]", *(f'{key} = "{value}"' for key, value in about.items())]
    for (operation, placement), rows in table.rows.items():
        for row in rows:
            limits = ", ".join(map(str, row.up_to_bytes))
            chosen = ", ".join(f'"{each}"' for each in names(row.algorithms))
            lines += [
                "",
                f"[[{operation.name.lower()}]]",
                f'hosts = "{placement.value}"',
                f"ranks = {row.ranks}",
                f"up_to_bytes = [{limits}]",
                f"algorithms = [{chosen}]",
            ]
    return "\n".join(lines) + "\n"


def names(algorithms: Iterable[Algorithm]) -> list[str]:
    return [algorithm.name.lower() for algorithm in algorithms]
