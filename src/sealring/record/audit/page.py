"""The audit as one HTML file that opens offline: claims, findings, and the graph to walk through.

What a record says is text in it and nothing else: it is escaped, and the page's policy lets only
the one style sheet and the one script run whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from sealring.formats.files import write_public
from sealring.record.audit.findings import Finding
from sealring.record.audit.graph import NodeKind
from sealring.record.audit.picture import Picture, as_svg, draw, for_script
from sealring.record.audit.result import Answer, AuditResult, Repetitions, Said, Status

_VERDICTS: Final = {Status.SHOWN: "yes", Status.REFUTED: "no", Status.NOT_SHOWN: "open"}
_SAID: Final = {Said.YES: ("yes", "✓"), Said.NO: ("no", "✗"), Said.NOT_SHOWN: ("open", "?")}
_LEGEND: Final = {
    NodeKind.RAW: "raw data", NodeKind.STAGE: "stage", NodeKind.DATA: "dataset",
    NodeKind.INTERVAL: "interval of a rank", NodeKind.CHECKPOINT: "checkpoint",
    NodeKind.EXPORT: "export, evaluation, model file",
}  # fmt: skip

MAX_SHOWN: Final = 1000
"""Findings on the page: a folder of tiny files could have a million of them."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A table that is shown on the page, and that the audit has not checked."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(path: Path, result: AuditResult, beside: Beside | None = None) -> None:
    """Replaces an older page; it appears whole or not at all."""
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
    """JSON inside HTML: no `<` is left, so nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _places(result: AuditResult, picture: Picture) -> dict[str, int]:
    """Digest of a record to the shape that it is behind."""
    found: dict[str, int] = {}
    for node in result.graph.nodes.values():
        for digest in node.records:
            # A checkpoint lists its writers' records too; the writers' own nodes go first.
            if digest not in found or node.kind is NodeKind.INTERVAL:
                found[digest] = picture.number[node.key]
    return found


def _verdict(result: AuditResult) -> str:
    return f'<p class="verdict {_VERDICTS[result.status]}">{result.verdict}</p>'


def _claims(answers: Iterable[Answer], places: dict[str, int]) -> str:
    rows = []
    for answer in answers:
        kind, mark = _SAID[answer.said]
        rows.append(
            f'<tr><th scope="row">{escape(answer.claim)}</th>'
            f'<td class="answer {kind}">{mark} {answer.said.value}</td>'
            f"<td>{escape(answer.text)}{_links(answer.records, places)}</td></tr>"
        )
    if not rows:
        return ""
    return (
        '<h2>Claims</h2><div class="scroll"><table><thead><tr><th scope="col">claim</th>'
        '<th scope="col">answer</th><th scope="col">why, and where</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _findings(findings: Sequence[Finding], places: dict[str, int]) -> str:
    items = []
    for finding in findings[:MAX_SHOWN]:
        against = f" Contradicted by:{_links(finding.against, places)}" if finding.against else ""
        items.append(
            f"<li><b>{escape(' or '.join(finding.parties))}</b> "
            f'<span class="muted">{finding.fault.value}, found by {finding.way.value}</span><br>'
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


def _graph(picture: Picture) -> str:
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
            f"<tr><td>{part.first_step} to {part.end.step}</td><td>{escape(part.end.name)}</td>"
            f"<td>{one.verdict}</td><td>{escape(size)}</td></tr>"
        )
    return (
        "<h2>Executed again</h2>"
        f"<p>{len(found.outcomes)} of {found.parts} parts, drawn with the seed "
        f'<span class="digest">{escape(found.seed)}</span>. Numbers may differ by '
        f"{found.tolerance:g} of the largest one of their tensor.</p>"
        f'<div class="scroll"><table><thead><tr><th scope="col">steps</th><th scope="col">'
        'checkpoint</th><th scope="col">verdict</th><th scope="col">largest difference</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _checked(result: AuditResult) -> str:
    log = result.log
    rows = [
        ("job", ", ".join(result.jobs)),
        ("statements verified", str(len(result.payloads))),
        ("ranks", str(result.ranks)),
        ("intervals", str(result.intervals)),
        ("log", "not believed" if log is None else f"{log.origin}, {log.size} entries"),
        ("cosigned by", "" if log is None else ", ".join(log.cosigned) or "no witness"),
    ]
    body = "".join(
        f'<tr><td class="key">{name}</td><td>{escape(value)}</td></tr>' for name, value in rows
    )
    return f"<h2>What was checked</h2><table><tbody>{body}</tbody></table>"


def _beside(table: Beside) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f"<h2>{escape(table.title)}</h2><p>The audit has not checked this table.</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
