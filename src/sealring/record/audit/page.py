"""The audit as one HTML file that opens offline: claims, findings, and the graph to walk through.

Text from records is escaped, and the page's policy allows only the one style sheet and the one
script whose hashes it names.

The picture goes from left to right: raw data, stages and datasets; a grid with a row for each rank
and a column for each interval, and the checkpoints below it; then exports and models. In a long run
one cell holds several intervals, so that the page opens quickly.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from sealring.formats.files import write_public
from sealring.record.audit.audit import AuditResult, Status
from sealring.record.audit.findings import ClaimAnswer, Finding, Said
from sealring.record.audit.graph import Graph, Node, NodeKind
from sealring.record.audit.spot_checks import Repetitions

# ---- the picture


MAX_CELLS: Final = 6400
_CELL, _PITCH = 14, 18
_BOX_WIDTH, _BOX_HEIGHT, _BOX_PITCH = 168, 34, 46
_COLUMN: Final = _BOX_WIDTH + 56
_MARGIN, _TOP = 24, 46
_LABEL: Final = 84
_GRID_KINDS: Final = (NodeKind.INTERVAL, NodeKind.CHECKPOINT)
_LONGEST: Final = 22


@dataclass(slots=True)
class Placed:
    """One shape of the picture: a node, or several intervals of one rank."""

    nodes: list[Node]
    x: float
    y: float
    width: float
    height: float
    at: tuple[int, int]
    """Column and row, for the arrow keys."""

    @property
    def kind(self) -> NodeKind:
        return self.nodes[0].kind

    @property
    def faulty(self) -> bool:
        return any(node.faulty for node in self.nodes)

    @property
    def title(self) -> str:
        first, last = self.nodes[0], self.nodes[-1]
        return first.title if first is last else f"{first.title} to {last.title}"


@dataclass(slots=True)
class GraphPicture:
    shapes: list[Placed] = field(default_factory=list)
    number: dict[str, int] = field(default_factory=dict)
    """The number of a node's shape, by the node's key."""
    edges: dict[tuple[int, int], str] = field(default_factory=dict)
    width: float = 0
    height: float = 0
    labels: list[tuple[float, float, str, str]] = field(default_factory=list)
    """x, y, the side at which the text is anchored, and the text."""
    last_row: int = 0
    """The grid's last row."""
    frame: tuple[float, float, float, float] | None = None
    """x, y, width and height of the grid with its labels."""

    def place(self, shape: Placed) -> None:
        for node in shape.nodes:
            self.number[node.key] = len(self.shapes)
        self.shapes.append(shape)


def draw(graph: Graph) -> GraphPicture:
    picture = GraphPicture()
    depths = _depths(graph)
    left = [
        n for n in graph.nodes.values() if n.kind in (NodeKind.RAW, NodeKind.STAGE, NodeKind.DATA)
    ]
    right = [
        n
        for n in graph.nodes.values()
        if n.kind in (NodeKind.EXPORT, NodeKind.EVALUATION, NodeKind.MODEL)
    ]
    x = float(_MARGIN)
    columns = _by_depth(left, depths)
    for place, nodes in enumerate(columns):
        _column(picture, nodes, x, place)
        x += _COLUMN
    x, column = _grid(picture, graph, x, len(columns))
    for place, nodes in enumerate(_by_depth(right, depths)):
        _column(picture, nodes, x, column + place)
        x += _COLUMN
    for (source, target), label in graph.edges.items():
        ends = picture.number[source], picture.number[target]
        if ends[0] != ends[1]:
            picture.edges[ends] = label
    picture.width = max(x, 320)
    picture.height = max((s.y + s.height for s in picture.shapes), default=0) + _MARGIN + 12
    return picture


def for_script(picture: GraphPicture, numbers: dict[str, int]) -> dict[str, Any]:
    """The picture as JSON for the script. `numbers`: each record's place in the list of records."""
    labels = sorted(set(picture.edges.values()))
    index = {label: number for number, label in enumerate(labels)}
    return {
        "nodes": [
            {
                "title": shape.title,
                "at": shape.at,
                "faulty": shape.faulty,
                "facts": [fact for node in shape.nodes for fact in node.facts][:200],
                "records": [
                    numbers[record]
                    for node in shape.nodes
                    for record in node.records
                    if record in numbers
                ],
            }
            for shape in picture.shapes
        ],
        "edges": [[*ends, index[label]] for ends, label in picture.edges.items()],
        "labels": labels,
    }


def as_svg(picture: GraphPicture) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width:g}" '
        f'height="{picture.height:g}" role="group" aria-label="The run as a graph">'
    ]
    if picture.frame is not None:
        x, y, width, height = picture.frame
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        parts.append(f'<rect class="frame" {shape} rx="6"/>')
    # Many edges end at the grid's frame and are the same line, so duplicates are left out.
    parts += list(dict.fromkeys(_path(picture, ends) for ends in picture.edges))
    parts += [
        f'<text class="small" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, y, anchor, text in picture.labels
    ]
    parts += [_shape(number, shape) for number, shape in enumerate(picture.shapes)]
    return "".join([*(part for part in parts if part), "</svg>"])


def _depths(graph: Graph) -> dict[str, int]:
    """The longest distance of each node from the raw data, without crossing the grid."""
    depths: dict[str, int] = {}
    before: dict[str, list[str]] = {}
    for source, target in graph.edges:
        if not {graph.nodes[source].kind, graph.nodes[target].kind} & set(_GRID_KINDS):
            before.setdefault(target, []).append(source)

    for start in graph.nodes:
        waiting = {start: None}  # a stack that can also be searched
        while waiting:
            key = next(reversed(waiting))
            if key in depths:
                waiting.popitem()
                continue
            outside = graph.nodes[key].kind in _GRID_KINDS
            needed = [] if outside else [one for one in before.get(key, []) if one not in depths]
            needed = [one for one in needed if one not in waiting]  # a cycle: draw it somehow
            if needed:
                waiting |= dict.fromkeys(needed)
                continue
            found = [] if outside else [depths.get(one, 0) for one in before.get(key, [])]
            depths[key] = 0 if outside else 1 + max(found, default=-1)
            waiting.popitem()
    return depths


def _by_depth(nodes: Sequence[Node], depths: dict[str, int]) -> list[list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        found.setdefault(depths[node.key], []).append(node)
    return [found[depth] for depth in sorted(found)]


def _column(picture: GraphPicture, nodes: list[Node], x: float, column: int) -> None:
    for row, node in enumerate(nodes):
        y = _TOP + row * _BOX_PITCH
        picture.place(Placed([node], x, y, _BOX_WIDTH, _BOX_HEIGHT, (column, row)))


def _grid(picture: GraphPicture, graph: Graph, x: float, column: int) -> tuple[float, int]:
    """Places intervals and checkpoints. Returns where the next column begins."""
    intervals = [node for node in graph.nodes.values() if node.kind is NodeKind.INTERVAL]
    checkpoints = [node for node in graph.nodes.values() if node.kind is NodeKind.CHECKPOINT]
    if not intervals and not checkpoints:
        return x, column
    ranks = sorted({node.rank for node in intervals})
    last = max((node.sequence for node in [*intervals, *checkpoints]), default=0)
    # Column 0 is for checkpoints from outside the run, whose sequence number is -1.
    together = -(-(last + 1) * max(1, len(ranks)) // MAX_CELLS)
    x += _LABEL
    cells: dict[tuple[int, int], list[Node]] = {}
    rows_of = {rank: row for row, rank in enumerate(ranks)}
    for node in sorted(intervals, key=lambda node: node.sequence):
        cells.setdefault((rows_of[node.rank], node.sequence // together), []).append(node)
    for (row, place), nodes in sorted(cells.items()):
        left = x + (place + 1) * _PITCH
        at = (column + 1 + place, row)
        picture.place(Placed(nodes, left, _TOP + row * _PITCH, _CELL, _CELL, at))
    for row, rank in enumerate(ranks):
        picture.labels.append((x + 6, _TOP + row * _PITCH + 11, "end", f"rank {rank}"))
    columns = last // together + 1
    picture.last_row = len(ranks) - 1
    rows = len(ranks)
    if checkpoints:
        rows += 1 + _checkpoints(picture, checkpoints, x, len(ranks), together, column)
    left = x - _LABEL
    width = _LABEL + (columns + 1) * _PITCH + 10
    picture.frame = (left, _TOP - 26, width, rows * _PITCH + 34)
    for place in range(0, columns, 10):
        middle = x + (place + 1) * _PITCH + _CELL / 2
        picture.labels.append((middle, _TOP - 10, "middle", str(place * together)))
    picture.labels.append((x + 6, _TOP - 10, "end", "interval"))
    if checkpoints:
        y = _TOP + (len(ranks) + 1) * _PITCH + 11
        picture.labels.append((x + 6, y, "end", "checkpoints"))
    return x + (columns + 1) * _PITCH + 56, column + 2 + columns


def _checkpoints(
    picture: GraphPicture, nodes: list[Node], x: float, ranks: int, together: int, column: int
) -> int:
    """Places checkpoints below the grid. Returns how many rows they take."""
    places: dict[int, list[Node]] = {}
    for node in nodes:
        places.setdefault(node.sequence // together if node.sequence >= 0 else -1, []).append(node)
    for place, found in places.items():
        # Several checkpoints of one interval are drawn below each other.
        for below, node in enumerate(found):
            y = _TOP + (ranks + 1 + below) * _PITCH
            at = (column + 1 + place, ranks + 1 + below)
            picture.place(Placed([node], x + (place + 1) * _PITCH, y, _CELL, _CELL, at))
    return max(len(found) for found in places.values())


def _path(picture: GraphPicture, ends: tuple[int, int]) -> str:
    """Draws an edge. Edges inside the grid are left out, but the script lists them all."""
    source, target = (picture.shapes[number] for number in ends)
    if source.kind in _GRID_KINDS and target.kind in _GRID_KINDS:
        interval = source if source.kind is NodeKind.INTERVAL else target
        # If many ranks write or read a checkpoint, only the last row's line is drawn.
        if NodeKind.CHECKPOINT not in (source.kind, target.kind) or (
            interval.at[1] != picture.last_row
        ):
            return ""
        lower = source if target is interval else target
        x1, y1 = interval.x + interval.width / 2, interval.y + interval.height
        x2, y2 = lower.x + lower.width / 2, lower.y
        return f'<path class="edge" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'
    x1, y1 = source.x + source.width, source.y + source.height / 2
    x2, y2 = target.x, target.y + target.height / 2
    if target.kind is NodeKind.INTERVAL and picture.frame is not None:
        x2, top, _, height = picture.frame
        y2 = min(max(y1, top + 12), top + height - 12)
    bend = max(24.0, (x2 - x1) / 2) if x2 > x1 else 60.0
    curve = f"C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    return f'<path class="edge" d="M{x1:g} {y1:g}{curve}"/>'


def _shape(number: int, shape: Placed) -> str:
    kind, title = shape.kind.value, escape(shape.title)
    faulty = " faulty" if shape.faulty else ""
    said = f"{title}, at fault" if shape.faulty else title
    # The script puts the chosen shape into the tab order; arrow keys go on from there.
    opened = (
        f'<g id="n{number}" class="node {kind}{faulty}" role="button" aria-label="{said}" '
        f'tabindex="-1"><title>{said}</title>'
    )
    middle_x, middle_y = shape.x + shape.width / 2, shape.y + shape.height / 2
    if shape.kind is NodeKind.CHECKPOINT:
        half = shape.width / 2
        drawn = (
            f'<path class="shape" d="M{middle_x:g} {middle_y - half:g}l{half:g} {half:g}'
            f'l{-half:g} {half:g}l{-half:g} {-half:g}z"/>'
        )
    else:
        radius = 2 if shape.kind is NodeKind.INTERVAL else 5
        drawn = (
            f'<rect class="shape" x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" '
            f'height="{shape.height:g}" rx="{radius}"/>'
        )
    text = ""
    if shape.kind not in _GRID_KINDS:
        plain = shape.title if len(shape.title) <= _LONGEST else f"{shape.title[: _LONGEST - 1]}…"
        text = f'<text x="{shape.x + 10:g}" y="{middle_y + 4:g}">{escape(plain)}</text>'
    if shape.faulty:
        x = middle_x if shape.kind in _GRID_KINDS else shape.x + shape.width - 12
        text += f'<text class="mark" x="{x:g}" y="{middle_y + 4:g}" text-anchor="middle">!</text>'
    return f"{opened}{drawn}{text}</g>"


# ---- the page


_VERDICTS: Final = {Status.SHOWN: "yes", Status.REFUTED: "no", Status.NOT_SHOWN: "open"}
_SAID: Final = {Said.YES: ("yes", "✓"), Said.NO: ("no", "✗"), Said.NOT_SHOWN: ("open", "?")}
_LEGEND: Final = {
    NodeKind.RAW: "raw data", NodeKind.STAGE: "stage", NodeKind.DATA: "dataset",
    NodeKind.INTERVAL: "interval of a rank", NodeKind.CHECKPOINT: "checkpoint",
    NodeKind.EXPORT: "export, evaluation, model file",
}  # fmt: skip

MAX_SHOWN: Final = 1000
"""The most findings on the page: a folder of tiny files could cause a million."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A table that the page shows but the audit has not checked."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(path: Path, result: AuditResult, beside: Beside | None = None) -> None:
    """Writes the page in one step, and replaces an older one."""
    write_public(path, page(result, beside).encode(errors="backslashreplace"))


def page(result: AuditResult, beside: Beside | None = None) -> str:
    resources = files("sealring.record.audit")
    style = resources.joinpath("page.css").read_text()
    script = resources.joinpath("page.js").read_text()
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    picture = draw(result.graph)
    numbers = {digest: number for number, digest in enumerate(result.payloads)}
    places = _places(result, picture)
    body = [
        f"<h1>Audit of {escape(result.run)}</h1>",
        _verdict(result),
        _claims(result.answers, places),
        _findings(result.findings, places),
        _graph(picture),
        _repeated(result.repetitions),
        _checked(result),
        "" if beside is None else _beside(beside),
        _data("graph", for_script(picture, numbers)),
        _data("records", list(result.payloads.items())),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>Audit of {escape(result.run)} - sealring</title><style>{style}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + f"\n</main><script>{script}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(name: str, value: Any) -> str:
    """JSON inside HTML. Each `<` is escaped, so that nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _places(result: AuditResult, picture: GraphPicture) -> dict[str, int]:
    """The number of the shape for each record's digest."""
    found: dict[str, int] = {}
    for node in result.graph.nodes.values():
        for digest in node.records:
            # A checkpoint also lists its writers' records. The writers' own nodes take precedence.
            if digest not in found or node.kind is NodeKind.INTERVAL:
                found[digest] = picture.number[node.key]
    return found


def _verdict(result: AuditResult) -> str:
    return f'<p class="verdict {_VERDICTS[result.status]}">{result.verdict}</p>'


def _claims(answers: Iterable[ClaimAnswer], places: dict[str, int]) -> str:
    rows = []
    for answer in answers:
        kind, mark = _SAID[answer.said]
        rows.append(
            f'<th scope="row">{escape(answer.claim)}</th>'
            f'<td class="answer {kind}">{mark} {answer.said.value}</td>'
            f"<td>{escape(answer.text)}{_links(answer.records, places)}</td>"
        )
    return f"<h2>Claims</h2>{_table(('claim', 'answer', 'why, and where'), rows)}" if rows else ""


def _findings(findings: Sequence[Finding], places: dict[str, int]) -> str:
    items = []
    for finding in findings[:MAX_SHOWN]:
        how = f"{finding.fault.value}, found by {finding.fault.way.value}"
        against = f" Contradicted by:{_links(finding.against, places)}" if finding.against else ""
        items.append(
            f"<li><b>{escape(finding.who)}</b> "
            f'<span class="muted">{how}</span><br>'
            f"{escape(finding.text)}{_links(finding.records, places)}{against}</li>"
        )
    if not items:
        return "<h2>Findings</h2><p>None.</p>"
    more = len(findings) - MAX_SHOWN
    rest = f"<p>And {more} more: <code>--json</code> lists all.</p>" if more > 0 else ""
    return f'<h2>Findings</h2><ul class="findings">{"".join(items)}</ul>{rest}'


def _links(records: Iterable[str], places: dict[str, int]) -> str:
    shown = list(records)
    made = []
    for digest in shown[:8]:
        name = f"{escape(digest[:12])}…"
        place = places.get(digest)
        made.append(
            f'<span class="digest muted">{escape(digest)}</span>'
            if place is None
            else f'<a href="#n{place}" data-node="{place}" title="{escape(digest)}">{name}</a>'
        )
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f" [{' '.join(made)}{more}]" if made else ""


def _graph(picture: GraphPicture) -> str:
    legend = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><g class="{kind.value}">'
        f'<rect class="shape" width="14" height="14" rx="2"/></g></svg>{text}</li>'
        for kind, text in _LEGEND.items()
    )
    return (
        "<h2>The run</h2>"
        "<p>Choose a shape to see its facts, where it comes from, and the signed records behind "
        "it. <kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd> move, <kbd>n</kbd> and "
        "<kbd>p</kbd> go to the next and previous one at fault (marked with !), <kbd>Enter</kbd> "
        "goes to the details.</p>"
        f'<ul class="legend">{legend}</ul>'
        f'<div class="picture" id="picture">{as_svg(picture)}</div>'
        '<div class="details" id="details" tabindex="-1" aria-live="polite"></div>'
        "<noscript><p>The details need the page's script.</p></noscript>"
    )


def _repeated(found: Repetitions | None) -> str:
    if found is None:
        return ""
    rows = []
    for one in found.outcomes:
        part, apart = one.stretch, one.difference
        size = "" if apart is None else f"{apart.size:.3g} in {apart.where}"
        rows.append(
            _cells(f"{part.first_step} to {part.end.step}", part.end.name, one.verdict, size)
        )
    return (
        "<h2>Executed again</h2>"
        f"<p>{len(found.outcomes)} of {found.parts} parts, drawn with the seed "
        f'<span class="digest">{escape(found.seed)}</span>. Numbers may differ by '
        f"{found.tolerance:g} of the largest one of their tensor.</p>"
        f"{_table(('steps', 'checkpoint', 'verdict', 'largest difference'), rows)}"
    )


def _checked(result: AuditResult) -> str:
    log = result.log
    rows = [
        ("job", ", ".join(result.jobs)),
        ("statements verified", str(len(result.payloads))),
        ("ranks", str(result.ranks)),
        ("intervals", str(result.intervals)),
        ("log", "not believed" if log is None else f"{log.origin}, {log.size} entries"),
        ("cosigned by", "" if log is None else ", ".join(log.witnesses) or "no witness"),
    ]
    body = "".join(
        f'<tr><td class="key">{name}</td><td>{escape(value)}</td></tr>' for name, value in rows
    )
    return f"<h2>What was checked</h2><table><tbody>{body}</tbody></table>"


def _beside(table: Beside) -> str:
    return (
        f"<h2>{escape(table.title)}</h2><p>The audit has not checked this table.</p>"
        f"{_table(table.columns, [_cells(*row) for row in table.rows])}"
    )


def _table(columns: Iterable[str], rows: Iterable[str]) -> str:
    """A table. `rows` are HTML already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(*texts: str) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)
