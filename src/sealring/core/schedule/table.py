"""The measured table: which algorithm for which size, world and topology.

Its file is TOML, as `python -m sealring.lab algorithms --table` writes it:

    [[all_reduce]]
    hosts = "one"                      # a Placement
    ranks = 4                          # for worlds of at least 4 ranks, up to the next entry's
    up_to_bytes = [32768]              # the first algorithm is for up to so many bytes,
    algorithms = ["direct", "ring"]    # the next one for more

Bytes are those of one rank's message: the tensor in an all-reduce, a reduce or a broadcast, and one
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
"""The only key of a file that is not an operation. It says where the table was measured."""
_MOST_RANKS: Final = 1 << 20
_MOST_BYTES: Final = 1 << 50

OPERATIONS: Final = {
    operation.name.lower(): operation
    for operation in Operation
    if len(ALGORITHMS[operation]) > 1 and operation is not Operation.BARRIER
}
"""The operations whose algorithm is chosen by the number of bytes, by their names."""
ALGORITHM_NAMES: Final = {algorithm.name.lower(): algorithm for algorithm in Algorithm}


class Placement(StrEnum):
    """The kind of a topology, which decides over which kind of link neighbours talk."""

    ONE = "one"
    """All ranks on one host."""
    ONE_RANK_EACH = "one_rank_each"
    """Every rank on a different host."""
    SEVERAL = "several"
    """More than one host, and at least one of them with more than one rank."""

    @classmethod
    def of(cls, topology: Topology) -> Placement:
        hosts = len(set(topology.host_of))
        if hosts == 1:
            return cls.ONE
        return cls.ONE_RANK_EACH if hosts == len(topology.host_of) else cls.SEVERAL


class Row(NamedTuple):
    """The best algorithms in worlds of at least `ranks` ranks."""

    ranks: int
    up_to_bytes: tuple[int, ...]
    algorithms: tuple[Algorithm, ...]
    """One algorithm more than limits; the last one is for all larger messages."""

    def at(self, nbytes: int) -> Algorithm:
        return self.algorithms[bisect_left(self.up_to_bytes, nbytes)]


ALWAYS_DIRECT: Final = Row(1, (), (Algorithm.DIRECT,))

Key = tuple[Operation, Placement]


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    rows: Mapping[Key, tuple[Row, ...]]
    """The rows for each operation and placement, by rising numbers of ranks."""

    def row(self, operation: Operation, placement: Placement, world: int) -> Row:
        """Returns the last row whose `ranks` is at most `world`; if there is none, the first row.

        An operation without a choice has no row in the table: it has one algorithm.
        """
        if operation not in OPERATIONS.values():
            return Row(1, (), ALGORITHMS[operation][:1])
        rows = self.rows.get((operation, placement), ()) or (ALWAYS_DIRECT,)
        begun = [row for row in rows if row.ranks <= world]
        return begun[-1] if begun else rows[0]

    def digest(self) -> int:
        """A hash of 48 bits, which ranks compare before they form a group."""
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
        """Returns this table, changed to one algorithm for each operation that `fixed` names."""
        rows = {
            (operation, placement): (Row(1, (), (algorithm,)),)
            for operation, algorithm in fixed.items()
            for placement in Placement
            if operation in OPERATIONS.values()
        }
        return AlgorithmTable(rows).over(self)

    def over(self, below: AlgorithmTable) -> AlgorithmTable:
        """Returns this table, with rows of `below` for operations and placements that it lacks.

        So a file that was measured on one host does not change the choice between hosts.
        """
        return AlgorithmTable({**below.rows, **self.rows})


@cache
def shipped_table() -> AlgorithmTable:
    """The table that comes with sealring; docs/algorithms.md says how it was measured."""
    text = resources.files("sealring.core.schedule").joinpath(SHIPPED).read_text()
    return parse_table(text, SHIPPED)


def parse_table(text: str, name: str) -> AlgorithmTable:
    """Parses a table; raises ConfigurationError, which names the file and the wrong entry."""
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
    """Returns the text of this table's file, which parse_table can read.

    `about` says what was measured and where. Its values must be printable and contain no quotes or
    backslashes.
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
