"""A violation as one HTML page: what was planned, what struck, what every rank did and when.

Nothing is loaded from anywhere; the page can be mailed and opened offline.
"""

from __future__ import annotations

from html import escape
from typing import Final

from tests.chaos.check import Violation
from tests.chaos.history import History, Outcome
from tests.chaos.plan import Call, Plan

_STYLE: Final = """
:root { --ink: #1b1f24; --dim: #68707a; --line: #d8dde3; --paper: #fff; --band: #f5f7f9;
  --right: #2f855a; --wrong: #c53030; --error: #b7791f; --fault: #6b46c1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #98a2ad; --line: #39414a;
  --paper: #15191d; --band: #1d2227; --right: #48bb78; --wrong: #fc8181; --error: #ecc94b;
  --fault: #b794f4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.1em; margin-top: 2em; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--band); border: 1px solid var(--line); border-radius: 6px; padding: .7em;
  overflow-x: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3em .8em .3em 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 500; } .dim { color: var(--dim); }
.wrong { color: var(--wrong); font-weight: 600; } .error { color: var(--error); }
.violation { border-left: 4px solid var(--wrong); padding: .1em 1em; margin: 1em 0;
  background: var(--band); }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.key span { margin-right: 1.5em; } .key i { display: inline-block; width: .8em; height: .8em;
  border-radius: 2px; margin-right: .4em; }
"""
_LEFT, _ROW, _WIDTH = 90, 34, 1060


def command(plan: Plan) -> str:
    return f"make chaos SEED={plan.seed} WORLD={plan.name}"


def page(plan: Plan, history: History, violations: list[Violation]) -> str:
    groups = "; ".join(f"{n}: {list(members)}" for n, members in enumerate(plan.groups))
    algorithm = plan.algorithm.name.lower() if plan.algorithm else "by size"
    facts = {
        "ranks": f"{plan.world} ({plan.where})",
        "transport": plan.transport,
        "record bytes": plan.record_bytes,
        "rekey bytes": plan.rekey_bytes,
        "algorithm": algorithm if plan.where == "processes" else "per call",
        "hosts": ", ".join(map(str, plan.hosts)),
        "groups": groups,
        "timeout": f"{plan.timeout_s:g} s",
        "machine stood still for": f"{history.longest_stall_s:.2f} s at most",
    }
    wrong = {(v.rank, v.call) for v in violations if v.call is not None}
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>chaos {escape(plan.name)}, seed {plan.seed}</title><style>{_STYLE}</style></head><body>
<h1>{len(violations)} violation{"s" * (len(violations) != 1)} in world {escape(plan.name)}</h1>
<p>Run it again (same traffic, same faults; threads and processes still race):</p>
<pre>{escape(command(plan))}</pre>
{"".join(_violation(each) for each in violations)}
<h2>Timeline</h2>
{_timeline(plan, history, wrong)}
<h2>Faults</h2>
{_faults(plan, history)}
<h2>The world</h2>
{_table([], [[escape(k), escape(str(v))] for k, v in facts.items()])}
<h2>Calls</h2>
{_calls(plan, history, wrong)}
</body></html>
"""


def _violation(violation: Violation) -> str:
    call = "" if violation.call is None else f" <code>{escape(str(violation.call.case))}</code>"
    difference = ""
    if violation.wanted is not None and violation.came is not None:
        difference = f"<pre>{escape(_difference(violation.wanted, violation.came))}</pre>"
    return (
        f'<div class="violation"><p><b>{escape(violation.rule)}</b>{call}<br>'
        f"{escape(violation.text)}</p>{difference}</div>"
    )


def _difference(wanted: bytes, came: bytes) -> str:
    if len(wanted) != len(came):
        return f"expected {len(wanted)} bytes, {len(came)} came"
    wrong = [at for at, (a, b) in enumerate(zip(wanted, came, strict=True)) if a != b]
    start = max(0, wrong[0] - wrong[0] % 16)
    return (
        f"{len(wrong)} of {len(wanted)} bytes differ, the first at {wrong[0]}\n"
        f"{start:8d}  expected  {wanted[start : start + 32].hex(' ')}\n"
        f"{start:8d}  came      {came[start : start + 32].hex(' ')}"
    )


def _timeline(plan: Plan, history: History, wrong: set[tuple[int | None, Call]]) -> str:
    times = [o.started for o in history.outcomes] + [hit.at for hit in history.hits]
    if not times:
        return '<p class="dim">No rank made a call.</p>'
    first = min(times)
    last = max([o.ended or o.started for o in history.outcomes] + times)
    span = max(last - first, 1e-3)

    def x(at: float) -> float:
        return _LEFT + (at - first) / span * (_WIDTH - _LEFT - 10)

    height = plan.world * _ROW + 46
    parts = []
    for rank in range(plan.world):
        y = rank * _ROW + 14
        state = " (killed)" if rank in history.dead else " (left)" * (rank in history.left)
        parts.append(f'<text x="0" y="{y + 13}">rank {rank}{state}</text>')
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y + 9}" y2="{y + 9}" stroke="var(--line)"/>'
        )
    for outcome in history.outcomes:
        y = outcome.rank * _ROW + 14
        end = outcome.ended if outcome.ended is not None else last
        colour = _colour(outcome, wrong)
        parts.append(
            f'<rect x="{x(outcome.started):.1f}" y="{y}" rx="2" height="18" fill="var(--{colour})" '
            f'fill-opacity=".75" width="{max(1.5, x(end) - x(outcome.started)):.1f}">'
            f"<title>{escape(_said(outcome))}</title></rect>"
        )
    for hit in history.hits:
        rows = [hit.fault.rank] if hit.fault.rank >= 0 else [hit.fault.sender, hit.fault.receiver]
        for rank in rows:
            y = rank * _ROW + 6
            parts.append(
                f'<path d="M{x(hit.at):.1f} {y} l6 -8 l-12 0 z M{x(hit.at):.1f} {y} v30" '
                f'stroke="var(--fault)" fill="var(--fault)">'
                f"<title>{escape(f'{hit.fault}: {hit.what}')}</title></path>"
            )
    axis = height - 8
    for step in range(5):
        at = first + span * step / 4
        anchor = "end" if step == 4 else "start"
        parts.append(
            f'<text x="{x(at):.0f}" y="{axis}" text-anchor="{anchor}">'
            f"{(at - first) * 1e3:.1f} ms</text>"
        )
    key = "".join(
        f'<span><i style="background:var(--{colour})"></i>{text}</span>'
        for colour, text in (
            ("right", "came back right"), ("error", "ended with an error"),
            ("wrong", "breaks a rule"), ("fault", "a fault strikes"),
        )
    )  # fmt: skip
    return (
        f'<p class="key dim">{key} Point at a bar to read it.</p><div class="scroll">'
        f'<svg viewBox="0 -6 {_WIDTH} {height + 6}" role="img">{"".join(parts)}</svg></div>'
    )


def _colour(outcome: Outcome, wrong: set[tuple[int | None, Call]]) -> str:
    if (outcome.rank, outcome.call) in wrong:
        return "wrong"
    return "error" if outcome.error is not None or outcome.ended is None else "right"


def _said(outcome: Outcome) -> str:
    call = str(outcome.call)
    if outcome.ended is None:
        return f"{call}: never ended"
    took = f"{(outcome.ended - outcome.started) * 1e3:.1f} ms"
    if outcome.error is None:
        return f"{call}: came back after {took}"
    return f"{call}: {outcome.error.name} after {took}: {outcome.error.text}"


def _faults(plan: Plan, history: History) -> str:
    if not plan.faults:
        return '<p class="dim">None was planned.</p>'
    began = min((outcome.started for outcome in history.outcomes), default=history.began)
    rows = []
    for fault in plan.faults:
        hits = [hit for hit in history.hits if hit.fault == fault]
        struck = "<br>".join(escape(f"{(hit.at - began) * 1e3:.1f} ms: {hit.what}") for hit in hits)
        rows.append([escape(str(fault)), struck or '<span class="dim">did not strike</span>'])
    return _table(["planned", "struck"], rows)


def _calls(plan: Plan, history: History, wrong: set[tuple[int | None, Call]]) -> str:
    rows = []
    calls = sorted(
        {outcome.call for outcome in history.outcomes},
        key=lambda c: (c.group, c.channel, c.number, str(c)),
    )
    for call in calls:
        cells = []
        for rank in range(plan.world):
            said = [o for o in history.outcomes if o.rank == rank and o.call == call]
            cells.append(
                "<br>".join(
                    f'<span class="{_colour(o, wrong)}" title="{escape(_said(o))}">'
                    f"{escape(_short(o))}</span>"
                    for o in said
                )
            )
        rows.append([f"{call.group}.{call.number}", escape(str(call.case)), *cells])
    return _table(["call", "what", *(f"rank {r}" for r in range(plan.world))], rows)


def _short(outcome: Outcome) -> str:
    if outcome.ended is None:
        return "never ended"
    if outcome.error is None:
        return "right" if not outcome.altered else "another call"
    error = outcome.error
    by = "" if error.reported_by is None else f" (by {error.reported_by})"
    return f"{error.name} about {error.peer}{by}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'
