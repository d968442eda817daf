"""The broker's page: who holds which rank, by what evidence, since when. It can only be read.

It needs nothing from anywhere else, runs no script, and says so in its policy: whatever a worker
manages to have shown here is text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from sealring.attest.broker.store import Row
from sealring.core.identity.names import WorkerName
from sealring.formats.http import Response

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #ddd; }
td.digest { font-family: ui-monospace, monospace; font-size: 13px; }
tr.out td { color: #777; }
.bad { color: #a40000; font-weight: 600; }
.simulated { background: #ffe9b3; padding: 0 .4rem; font-weight: 600; }
"""
_COLUMNS: Final = (
    "job", "rank", "evidence", "measurement", "machine", "verified", "certificate ends", "joined",
    "verdict",
)  # fmt: skip
_SHOWN: Final = 16
_REFUSALS_SHOWN: Final = 10


def render(holders: Sequence[tuple[WorkerName, Row, bool]], refused: Row, now: float) -> Response:
    rows = "\n".join(_row(name, holder, out, now) for name, holder, out in holders)
    simulated = sum(holder["facts"]["worker"]["simulated"] for _, holder, _ in holders)
    warning = (
        f'<p><span class="simulated">SIMULATED</span> evidence proves nothing: {simulated} of '
        f"{len(holders)} workers show it.</p>"
        if simulated
        else ""
    )
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    html = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>sealring broker</title>
<meta http-equiv="refresh" content="10"><style>{_STYLE}</style></head>
<body><h1>sealring broker</h1>{warning}
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table>
<p>{len(holders)} ranks are held. {_time(now)}</p>
{_refused(refused)}</body></html>"""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return Response(200, html.encode(), "text/html; charset=utf-8", headers)


def _refused(refused: Row) -> str:
    """Who came with nothing that could be believed: counts, and the last of them."""
    counts, last = refused["counts"], refused["last"]
    if not counts:
        return "<p>Nothing was refused before it proved anything.</p>"
    kinds = ", ".join(f"{escape(name)} {counts[name]}" for name in sorted(counts))
    rows = "".join(
        f"<tr><td>{_time(one['time'])}</td><td>{escape(one['address'])}</td>"
        f"<td>{escape(one['error'])}</td><td>{escape(one['why'])}</td></tr>"
        for one in reversed(last[-_REFUSALS_SHOWN:])
    )
    head = "<tr><th>time</th><th>address</th><th>error</th><th>why</th></tr>"
    return (
        f"<h2>Refused before anything was proven</h2><p>{sum(counts.values())} since "
        f"{_time(refused['since'])}: {kinds}. The last of them:</p>"
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    )


def _row(name: WorkerName, holder: Row, out: bool, now: float) -> str:
    worker, until = holder["facts"]["worker"], holder["certificate_until"]
    kind = escape(holder["kind"])
    evidence = f'<span class="simulated">{kind}</span>' if worker["simulated"] else kind
    ended = until is not None and until < now
    verdict = "revoked" if out else "certificate ended" if ended else "admitted"
    shown = f'<span class="bad">{verdict}</span>' if out or ended else verdict
    cells = [
        escape(name.job),
        str(name.rank),
        evidence,
        _digest(worker["measurement"]),
        _digest(worker["machine"]),
        f"{_age(now - holder['attested'])} ago",
        "not issued yet" if until is None else _time(until),
        f"{_time(holder['joined'])} (join {holder['joins']})",
        shown,
    ]
    classes = ["", "", "", ' class="digest"', ' class="digest"', "", "", "", ""]
    body = "".join(f"<td{css}>{cell}</td>" for css, cell in zip(classes, cells, strict=True))
    return f"<tr{' class=out' if out or ended else ''}>{body}</tr>"


def _digest(text: str) -> str:
    if not text:
        return "-"
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return f'<span title="{escape(text, quote=True)}">{escape(short)}</span>'


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(0.0, seconds))} s"
