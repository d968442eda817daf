"""Where the data came from: raw sources, and the stages on every way from them."""

from __future__ import annotations

from collections.abc import Iterable

from sealring.record.audit.build import artefact
from sealring.record.audit.graph import Graph, NodeKind
from sealring.record.audit.records import NOT_COUNTED, Made, Records

_MAX_WAYS = 1000
_MAX_STAGES = 1 << 20
"""On all ways to all datasets together: they would take a stranger little to write."""


def unlisted_sources(graph: Graph, listed: frozenset[str]) -> list[str]:
    """Keys of what training came from that is neither listed nor made from what is listed."""
    allowed = {artefact(sha256) for sha256 in listed}
    waiting = [node.key for node in graph.nodes.values() if node.kind is NodeKind.INTERVAL]
    seen: set[str] = set()
    found = []
    while waiting:
        key = waiting.pop()
        if key in seen or key in allowed:
            continue
        seen.add(key)
        before = graph.sources(key)
        if not before and graph.nodes[key].kind is not NodeKind.INTERVAL:
            found.append(key)
        waiting += before
    return sorted(found)


def unknown_origin(records: Records, name: str) -> str:
    """What is said of a dataset that no record which counts says the making of."""
    alone = [
        one.signer for one in records.uncounted if any(o.name == name for o in one.content.outputs)
    ]
    said = f"; {alone[0]} alone says how: {NOT_COUNTED}" if alone else ""
    return f"no record says how {name} was made{said}"


def signed_by(made: Iterable[Made]) -> str:
    """The end of an answer that rests on these records."""
    signers = sorted({one.signer for one in made})
    more = f" and {len(signers) - 4} more" if len(signers) > 4 else ""
    listed = ", ".join(signers[:4])
    return f"; how data was made is signed by {listed}{more}" if signers else ""


class Ways:
    """The sequences of stages that led to a dataset, one for each way from its raw data."""

    def __init__(self, records: Records) -> None:
        self.made = {made.digest: made for made in records.made}
        self._makers: dict[str, list[Made]] = {}
        for made in records.made:
            if made.content.kind in ("ingest", "stage"):
                for output in made.content.outputs:
                    self._makers.setdefault(output.sha256, []).append(made)
        self._found: dict[str, frozenset[tuple[str, ...]] | None] = {}
        self._stages = 0

    def of(self, sha256: str) -> frozenset[tuple[str, ...]] | None:
        """Digests of the stages' statements. None: too many or too long ways, or a cycle.

        An empty way says that no record tells how the dataset was made.
        """
        try:
            return self._of(sha256)
        except RecursionError:
            return None

    def _of(self, sha256: str) -> frozenset[tuple[str, ...]] | None:
        if sha256 in self._found:
            return self._found[sha256]
        self._found[sha256] = None  # while it is being looked for: a cycle ends here
        makers = self._makers.get(sha256, [])
        ways: set[tuple[str, ...]] = set() if makers else {()}
        for made in makers:
            sources = [self._of(one.sha256) for one in made.content.inputs] or [frozenset({()})]
            for before in sources:
                if before is None or len(ways) + len(before) > _MAX_WAYS:
                    return None
                longer = {(*way, made.digest) for way in before}
                self._stages += sum(map(len, longer))
                if self._stages > _MAX_STAGES:
                    return None
                ways |= longer
        self._found[sha256] = frozenset(ways)
        return self._found[sha256]
