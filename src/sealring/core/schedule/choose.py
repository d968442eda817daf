"""Chooses a collective's algorithm: the one that was set by hand, else the table's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Final

from sealring import limits
from sealring.core.schedule.build import ALGORITHMS, passes_records_on
from sealring.core.schedule.hierarchical import Topology, one_host
from sealring.core.schedule.program import CALLED, Algorithm, Operation
from sealring.core.schedule.table import (
    ALGORITHM_NAMES,
    AlgorithmTable,
    Placement,
    Row,
    names,
    shipped_table,
)
from sealring.errors import ConfigurationError

NOTHING_SET: Final[Mapping[Operation, Algorithm]] = MappingProxyType({})

_MOST_LINKS: Final = 64
"""The most links of a rank for one program. The first link between two workers costs a TLS
handshake, and every group has its own sockets. The table does not include these costs: it was
measured in small worlds whose links existed."""
_FEWER_LINKS: Final = {
    Operation.ALL_REDUCE: Algorithm.RING,
    Operation.REDUCE_SCATTER: Algorithm.RING,
    Operation.ALL_GATHER: Algorithm.RING,
    Operation.BROADCAST: Algorithm.TREE,
    Operation.REDUCE: Algorithm.TREE,
}


class Selection:
    """One group's choices. The table is looked up once per group, so that a call is cheap."""

    def __init__(
        self,
        topology: Topology,
        table: AlgorithmTable | None = None,
        fixed: Mapping[Operation, Algorithm] = NOTHING_SET,
    ) -> None:
        """`fixed` takes precedence over the table. Both must be equal on all ranks."""
        self._topology, self._fixed = topology, fixed
        placement, world = Placement.of(topology), len(topology.host_of)
        chosen = shipped_table() if table is None else table
        self._rows = {
            operation: Row(1, (), (fixed[operation],))
            if operation in fixed
            else _with_few_links(operation, chosen.row(operation, placement, world), topology)
            for operation in Operation
        }

    def __call__(self, operation: Operation, nbytes: int) -> Algorithm:
        """The algorithm for a collective in which a rank's message has `nbytes` bytes
        (table.py)."""
        return self._rows[operation].at(nbytes)

    def without_forwards(self) -> Selection:
        """Returns the selection for a way between GPUs on which no rank forwards records.

        Algorithms that forward are replaced by the hierarchical one. On one host that means a
        direct exchange, in chunks if that saves bytes. An algorithm stays if the replacement needs
        too many links, or if it was set by hand.
        """

        def instead(operation: Operation, algorithm: Algorithm) -> Algorithm:
            world = len(self._topology.host_of)
            forwards = passes_records_on(operation, algorithm, world, self._topology)
            possible = Algorithm.HIERARCHICAL in ALGORITHMS[operation]
            other = forwards and possible and has_few_links(Algorithm.HIERARCHICAL, self._topology)
            return Algorithm.HIERARCHICAL if other else algorithm

        other = copy(self)
        other._rows = {
            operation: row
            if operation in self._fixed
            else row._replace(algorithms=tuple(instead(operation, a) for a in row.algorithms))
            for operation, row in self._rows.items()
        }
        return other


def _with_few_links(operation: Operation, row: Row, topology: Topology) -> Row:
    """The row, with algorithms replaced whose programs need too many links in this topology."""

    def instead(algorithm: Algorithm) -> Algorithm:
        if operation is Operation.BARRIER:
            # A larger group formed along the tree, so it has the tree's links already.
            linked = len(topology.host_of) <= limits.MOST_LINKED_AT_ONCE
            return Algorithm.DIRECT if linked else Algorithm.TREE
        if operation not in _FEWER_LINKS or has_few_links(algorithm, topology):
            return algorithm
        short = operation is Operation.ALL_REDUCE and algorithm is Algorithm.DIRECT
        return Algorithm.TREE if short else _FEWER_LINKS[operation]

    return row._replace(algorithms=tuple(map(instead, row.algorithms)))


def has_few_links(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether each rank needs so few links that the algorithm may be chosen automatically."""
    return _most_links(algorithm, topology) <= _MOST_LINKS


def _most_links(algorithm: Algorithm, topology: Topology) -> int:
    """An upper bound of a rank's links in one of the algorithm's programs."""
    world, on_host = len(topology.host_of), Counter(topology.host_of)
    match algorithm:
        case Algorithm.RING | Algorithm.TREE:
            return world.bit_length() + 1
        case Algorithm.HIERARCHICAL:
            # A host's ranks share the links to other hosts: on a small host each has many.
            least, most = min(on_host.values()), max(on_host.values())
            return most - 2 + sum(-(-ranks // least) for ranks in on_host.values())
    return world - 1


def choose(
    operation: Operation, world: int, nbytes: int, override: Algorithm | None = None
) -> Algorithm:
    """The shipped table's choice for a world on one host, or `override` if the operation has it."""
    if override in ALGORITHMS[operation]:
        return override
    return shipped_table().row(operation, Placement.of(one_host(world)), world).at(nbytes)


def everywhere(algorithm: Algorithm) -> dict[Operation, Algorithm]:
    """Maps all operations that have this algorithm to it."""
    return {operation: algorithm for operation in CALLED if algorithm in ALGORITHMS[operation]}


def parse_fixed(text: str, name: str) -> dict[Operation, Algorithm]:
    """Parses "ring", "all_reduce=ring,broadcast=tree" or a mix. `name` names the setting in errors.

    An algorithm alone is for every operation that has it; `operation=algorithm` takes precedence.
    """
    general: dict[Operation, Algorithm] = {}
    special: dict[Operation, Algorithm] = {}
    for item in text.split(","):
        word, equals, value = (part.strip() for part in item.partition("="))
        wanted = ALGORITHM_NAMES.get(value if equals else word)
        if not equals:
            if wanted is None:
                raise ConfigurationError(
                    f"{name} is {text!r}; set it to one of {', '.join(ALGORITHM_NAMES)}, or to "
                    "such as all_reduce=ring,broadcast=tree, or unset it"
                )
            if general:
                raise ConfigurationError(f"{name} is {text!r}; it names two algorithms for all")
            general = everywhere(wanted)
            continue
        operation = Operation.__members__.get(word.upper()) if word == word.lower() else None
        if operation not in CALLED:
            known = ", ".join(each.name.lower() for each in CALLED)
            raise ConfigurationError(
                f"{name} is {text!r}; {word!r} is not an operation, there is {known}"
            )
        if wanted not in ALGORITHMS[operation]:
            raise ConfigurationError(
                f"{name} is {text!r}; {word} has {', '.join(names(ALGORITHMS[operation]))}"
            )
        if operation in special:
            raise ConfigurationError(f"{name} is {text!r}; it names {word} twice")
        special[operation] = wanted
    return {**general, **special}
