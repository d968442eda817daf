"""Makes the page: one file without scripts that fetches nothing and escapes all text of results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Final

from sealring.formats.files import write_public
from sealring.lab.bench.cc import SOURCES
from sealring.lab.bench.harness import SAME_WITHIN
from sealring.lab.report import plots
from sealring.lab.report.findings import (
    FIGURES,
    STUDY,
    Overhead,
    best_buckets,
    changes,
    collective_overheads,
    overheads,
    pairs,
    span_of,
)
from sealring.lab.report.plots import Numbers, Picture
from sealring.lab.results import Results, usable

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy by which the browser keeps the page from running or fetching anything."""


def write_page(path: Path, results: Results, other: Results | None = None) -> None:
    """Writes the page atomically, replacing an older one."""
    write_public(path, page(results, other).encode())


def page(results: Results, other: Results | None = None) -> str:
    """The page that explains one results file, or compares two; `other` is the later one."""
    title = "What protection costs" if other is None else "What protection costs: two measurements"
    body = [f"<h1>{title}</h1>"]
    if other is None:
        body += [_lead(results), *_sections(results)]
    else:
        found = pairs(results, other)
        body += [
            '<p class="lead">The first was made with '
            f"<code>{escape(results.command)}</code> ({escape(results.made)}), the second with "
            f"<code>{escape(other.command)}</code> ({escape(other.made)}).</p>",
            _figure(plots.comparison(found))
            or '<p class="warning">The two have no case in common.</p>',
            "<h2>The second by itself</h2>",
            _lead(other),
            *_sections(other),
            "<h2>The first was measured on</h2>",
            _machine(results),
        ]
    style = files("sealring.lab.report").joinpath("page.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - sealring</title><style>{style}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _lead(results: Results) -> str:
    """The result measured here, in one sentence, and a warning if the run was stopped."""
    stopped = ""
    if not results.complete:
        why = escape(results.stopped or "it was stopped")
        stopped = f'<p class="warning">This run is not complete: {why}.</p>'
    own = re.sub(r"([\d.]+( to [\d.]+)? times)", r"<b>\1</b>", escape(headline(results)), count=1)
    return stopped + f'<p class="lead">{own}</p>'


def headline(results: Results) -> str:
    """The result of training steps, or else of collectives, in one sentence."""
    best = [each for each in best_buckets(overheads(results)) if each.case.variant == "sealed"]
    if results.step:
        return _of_steps(best)
    found = collective_overheads(results)
    told = [each for each in found if not each.only_noise]
    if not found:
        return "No training step was measured, and no collective of CPU tensors beside a plain one."
    if not told:
        return (
            "The samples of collectives are too noisy to tell sealed from plain: measure again on "
            "a quiet machine, or with more samples."
        )
    return (
        f"On this machine a sealed collective takes {span_of(told)} times the plain one, in "
        f"the {len(told)} of {len(found)} cases that the samples tell apart. No training step was "
        "measured: `sealring bench step` does that."
    )


def _published() -> str:
    figures = ", ".join(f"{each.overhead:g} ({each.what})" for each in FIGURES)
    return (
        '<section id="published"><h2>What others published</h2><p>For GPU TEEs, as a multiple of '
        f"the time of a step without protection ({STUDY}): {figures}. None of it was measured "
        "here.</p></section>"
    )


def _of_steps(best: Sequence[Overhead]) -> str:
    """The result of training steps; also mentions settings whose samples are only noise."""
    told = [each.against_plain for each in best if not each.against_plain.only_noise]
    if not told:
        return (
            "The samples of training steps are too noisy to tell sealed from plain: measure again "
            "on a quiet machine, or with more steps."
        )
    said = f"On this machine a sealed training step takes {span_of(told)} times the plain one"
    if len(best) == 1:
        return f"{said} ({best[0].setting})."
    if len(told) == len(best):
        return f"{said}, at the better bucket size of each of {len(best)} settings."
    noise = max(each.against_plain.noise for each in best if each.against_plain.only_noise)
    return (
        f"{said} in {len(told)} of {len(best)} settings, each at its better bucket size; the "
        f"samples of the others are too noisy to tell (±{noise:.0%})."
    )


def _sections(results: Results) -> Iterable[str]:
    found = overheads(results)
    of_cpu, of_gpu = plots.rooflines(results)
    pictures = (
        plots.overhead(found),
        plots.buckets(found),
        plots.split(results),
        plots.timeline(results),
        plots.links(results),
        of_cpu,
        plots.forming(results),
        plots.bars(results),
        of_gpu,
    )
    yield _changes(results)
    for picture in pictures:
        yield _figure(picture)
    yield _collectives(results)
    yield _published()
    yield "<h2>What was measured, and how</h2>"
    yield _machine(results)
    yield _method(results)


def _figure(picture: Picture | None) -> str:
    if picture is None:
        return ""
    said = escape(picture.said)
    shown = f"<p>{said}</p>"
    if picture.drawn:
        drawn = f'<div role="img" aria-label="{said}">{picture.drawn}</div>'
        shown = f"<figure>{drawn}<figcaption>{said}</figcaption></figure>"
    return (
        f'<section id="{picture.key}"><h2>{escape(picture.title)}</h2>{shown}'
        f"<details><summary>The numbers</summary>{_table(picture.numbers)}</details>"
        "</section>"
    )


def _table(numbers: Numbers) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in numbers.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in numbers.rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _changes(results: Results) -> str:
    found = changes(results)
    if not found:
        return ""
    items = "".join(
        f'<li><span class="gain">up to {change.gain:.0%} of a step</span>: {escape(change.what)}. '
        f'<span class="muted">{escape(change.why)}.</span></li>'
        for change in found[:6]
    )
    return (
        '<section id="changes"><h2>What to change for the largest gain</h2>'
        f'<ol class="changes">{items}</ol></section>'
    )


def _collectives(results: Results) -> str:
    cases = usable([*results.allreduce, *results.collectives])
    if not cases:
        return ""
    rows = [
        (
            case.collective,
            str(case.ranks),
            f"{case.bytes:,}",
            case.transport if case.device == "cpu" else f"{case.transport}, {case.device}",
            plots.VARIANTS[case.variant],
            f"{median(case.seconds) * 1e6:,.0f} µs",
        )
        for case in cases
    ]
    columns = ("collective", "ranks", "bytes", "transport", "variant", "median")
    return (
        '<section id="collectives"><h2>Collectives</h2><details><summary>Medians of '
        f"{len(rows)} cases</summary>{_table(Numbers(columns, rows))}</details></section>"
    )


def _machine(results: Results) -> str:
    machine = results.machine
    features = f" ({', '.join(machine.features)})" if machine.features else ""
    rows = [
        ("command", results.command),
        ("made", results.made),
        ("processor", f"{machine.cpu}, {machine.cores} cores{features}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("GPUs", ", ".join(machine.gpus) or "none"),
        ("system", f"{machine.system}, {machine.architecture}"),
        (
            "software",
            f"sealring {machine.sealring}, torch {machine.torch}, Python {machine.python}, "
            f"{machine.openssl}",
        ),
    ]
    return _table(Numbers(("", ""), rows))


def _method(results: Results) -> str:
    sources = "; ".join(f"{escape(what)} ({escape(source)})" for what, source in SOURCES)
    emulated = (
        "<p>The <b>GPU-TEE path</b> here is an emulation: a ring whose every sub-step goes through "
        "a bounce buffer, AES-256-GCM by one CPU thread with one tag a message, and nothing "
        f"overlapped. Its parameters and where they are from: {sources}. It shows that path's cost "
        "on this machine's links and cores; it is no measurement of a GPU.</p>"
        if any(case.variant == "cc" for case in results.step)
        else ""
    )
    return (
        "<p>The variants of a case took turns in one run, after a warm-up, and each goes first "
        "equally often. Times are medians, of the slowest rank where there are several. Behind a "
        "ratio stands the interval in which 19 of 20 repetitions would find it, from pairs of "
        "samples taken beside each other. Where that interval holds 1 and is wider than "
        f"±{SAME_WITHIN:.0%}, the page says &ldquo;only noise&rdquo; and gives no ratio.</p>"
        "<p>The split of a step comes from the engine's own account and from its flight record. "
        "Communication is exposed if it ran after the last gradient was there, or before the "
        "backward pass; its parts are taken to be exposed in the same proportion. Where a rank has "
        "one core, hidden work slows the model's own, which then shows as computing.</p>" + emulated
    )
