"""A run as a graph: raw data, stages, datasets, ranks by intervals, checkpoints, exported files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter


class NodeKind(StrEnum):
    RAW = "raw"
    """Data that no record says the origin of."""
    STAGE = "stage"
    DATA = "data"
    INTERVAL = "interval"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    EVALUATION = "evaluation"
    MODEL = "model"


@dataclass(slots=True)
class Node:
    key: str
    kind: NodeKind
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    """Digests of the statements behind it."""
    rank: int = -1
    sequence: int = -1
    """Of an interval; a checkpoint has the sequence number of the interval that wrote it."""
    faulty: bool = False


@dataclass(slots=True)
class Graph:
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    """(source, target) to what the target did with the source."""
    _before: dict[str, list[str]] = field(default_factory=dict)

    def add(self, key: str, kind: NodeKind, title: str) -> Node:
        """The node of this key, which is made if it is new."""
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = Node(key, kind, title)
        return found

    def connect(self, source: str, target: str, label: str) -> None:
        if (source, target) not in self.edges:
            self._before.setdefault(target, []).append(source)
        self.edges[source, target] = label

    def sources(self, key: str) -> list[str]:
        return self._before.get(key, [])

    def cycle(self) -> list[str]:
        """The keys along a cycle, or nothing: what leads to itself cannot be believed."""
        try:
            TopologicalSorter(self._before).prepare()
        except CycleError as found:
            return list(found.args[1])
        return []
