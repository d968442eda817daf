"""`sealring plan`: predicts a training step's time and cost before machines are rented."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from sealring.cli.options import AsJson
from sealring.cli.terminal import console, human_bytes, number_table, print_json, progress_bar
from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import Answer, Question, WayAnswer, answer, forming_of, machine
from sealring.lab.plan.fit import gpu_of
from sealring.lab.plan.layouts import ITEMSIZE, Compute
from sealring.lab.plan.models import MODELS, load_model, with_tokens
from sealring.lab.plan.profiles import (
    NOTHING,
    Figure,
    Profile,
    load_network,
    load_profile,
    network_names,
    profile_names,
)
from sealring.lab.plan.validate import Validation, computing
from sealring.lab.results import read_results


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A name, a parameter list (.json), or module:factory of your own."),
    ] = None,
    ranks: Annotated[
        str, typer.Option(help="One GPU (or process) each: 8, or several: 2,4,8, or 2..16384.")
    ] = "8",
    profile: Annotated[
        str, typer.Option(help="A machine's name, a .toml file, or results.json of bench.")
    ] = "h200-sealring",
    per_host: Annotated[
        int | None, typer.Option(help="Ranks on one host; the machine's own number if left out.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Between hosts: 100gbe, ndr400, wan, or a .toml file.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Per sample, for a model of your own: how often it uses a parameter."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Per GPU (rank) and hour.")] = None,
    compute_ms: Annotated[
        float | None, typer.Option(help="A step of one rank without communication, if measured.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Where each figure of --profile comes from.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Models, profiles and networks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a training step on machines you don't have: time, memory, cost, best settings."""
    if list_:
        show_list(as_json)
    elif sources:
        show_sources(machine(profile), as_json)
    elif model is None:
        raise ConfigurationError(
            "name a model, e.g. `sealring plan gpt2-xl --ranks 8`; --list shows which there are"
        )
    else:
        if precision not in ITEMSIZE:
            raise ConfigurationError(f"--precision is {precision!r}; it must be fp32, bf16 or fp16")
        worlds = parse_ranks(ranks)
        loaded, known = load_model(model), machine(profile)
        if tokens is not None:
            loaded = with_tokens(loaded, tokens)
        question = Question(
            loaded,
            known,
            load_network(network or known.network),
            worlds[0],
            int(known.device.ranks_per_host.value) if per_host is None else per_host,
            loaded.batch if batch is None else batch,
            precision,
            price,
        )
        question = _measured(question, model, profile, compute_ms)
        if len(worlds) > 1:
            show_sweep(_swept(question, worlds), as_json)
        else:
            show_answer(answer(question), as_json)


def _measured(question: Question, model: str, profile: str, compute_ms: float | None) -> Question:
    """The question with measured times, if they are given as --compute-ms or in a results file."""
    if compute_ms is not None:
        if not 0 < compute_ms < 1e12:
            raise ConfigurationError(f"--compute-ms {compute_ms:g} is no time for a step")
        # A third is forward, two thirds are backward. The optimizer's part is small.
        compute = Compute(compute_ms / 3e3, compute_ms / 1.5e3, 0.0)
        return dataclasses.replace(question, compute=compute)
    if not profile.endswith(".json"):
        return question
    results = read_results(Path(profile))
    device = gpu_of(results) if question.profile.device.kind == "gpu" else None
    measured = computing(
        results, model, question.batch, question.precision, question.cluster.per_host,
        device=device or "cpu",
    )  # fmt: skip
    formed = forming_of(results.scale, f"`sealring bench all`, {results.made}")
    return dataclasses.replace(question, compute=measured, forming=formed)


def parse_ranks(text: str) -> list[int]:
    """Parses numbers of ranks: "8", "2,4,8", or "2..16384" for 2, 4, 8, ... 16384."""
    match = re.fullmatch(r"(?:(\d{1,6})\.\.(\d{1,6})|(\d{1,6}(?:,\d{1,6})*))", text)
    if match is None:
        raise ConfigurationError(f"--ranks is {text!r}; write 8, 2,4,8 or 2..16384")
    if match[3] is not None:
        return [int(part) for part in match[3].split(",")]
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise ConfigurationError(f"--ranks {text} goes nowhere: the first must be 1 or more")
    worlds = [low]
    while worlds[-1] * 2 <= high:
        worlds.append(worlds[-1] * 2)
    return worlds


def _swept(question: Question, worlds: list[int]) -> list[Answer]:
    found = []
    with progress_bar("{task.completed:.0f}/{task.total}") as bar:
        task = bar.add_task("planning", total=len(worlds))
        for ranks in worlds:
            found.append(answer(dataclasses.replace(question, ranks=ranks)))
            bar.advance(task)
    return found


_BAR: Final = 8

# ---- one answer


def show_answer(found: Answer, as_json: bool) -> None:
    if as_json:
        print_json(found.as_json())
        return
    where = f"{found.hosts} hosts over {found.network}" if found.hosts > 1 else "one host"
    rows: list[tuple[str, Callable[[WayAnswer], str]]] = [
        ("step", lambda each: _time(each.seconds)),
        ("against plain", lambda each: f"[bold]{each.against_plain:.2f}[/bold]"),
        ("computing", lambda each: _time(each.compute_s)),
        ("exchanges, exposed", lambda each: _time(each.exposed_s)),
        ("exchanges, together", lambda each: _time(each.communicating_s)),
        ("samples a second", lambda each: f"{each.samples_per_s:,.1f}"),
        ("best bucket_cap_mb", lambda each: _bucket(each.bucket_mb, each.default_buckets)),
        ("with default buckets", lambda each: _time(each.default_bucket_seconds)),
        ("algorithm", lambda each: each.algorithm if each.way == "sealed" else "-"),
    ]
    if found.cost_per_day is not None:
        rows.append(
            ("cost of a million samples", lambda each: f"{each.cost_per_million_samples:,.2f}")
        )
    made = number_table(
        f"{found.model}, {found.parameters:,} parameters, {found.precision}, batch {found.batch} a "
        f"rank: {found.ranks} ranks of {found.profile}, {where}",
        ("", *(each.way for each in found.ways)),
        ((name, *(cell(each) for each in found.ways)) for name, cell in rows),
        caption=f"{found.layout}: {found.why}. Predicted, not measured.",
    )
    console.print(made, _layouts(found), *_by_size(found), sep="\n")
    if found.ranks > 1:
        console.print(
            f"The sealed group of all {found.ranks:,} ranks forms in {_time(found.forming_s)}.",
            highlight=False,
        )
    if found.cost_per_day is not None:
        protected = found.ways[-1]
        lost = found.cost_per_day * (1 - 1 / protected.against_plain)
        console.print(
            f"{found.cost_per_day:,.2f} a day; of these {lost:,.2f} for protection "
            f"({protected.way}).",
            highlight=False,
        )


def _layouts(found: Answer) -> Table:
    marks = {True: "[green]yes[/]", False: "[red]no[/]"}
    rows = []
    for name in ("parameters", "gradients", "optimizer", "activations", "buffers"):
        held = [getattr(layout.memory, name) for layout in found.layouts]
        rows.append([name, *(human_bytes(each) if each else "not known" for each in held)])
    rows.append(["together", *(human_bytes(layout.device_bytes) for layout in found.layouts)])
    rows.append(["fits", *(marks[layout.fits] for layout in found.layouts)])
    for way in found.ways:
        times = [layout.seconds.get(way.way) for layout in found.layouts]
        rows.append([f"step, {way.way}", *map(_time, times)])
    links = human_bytes(found.layouts[0].memory.host_links)
    return number_table(
        "Memory of one rank, and what a step takes",
        ("", *(layout.layout for layout in found.layouts)),
        rows,
        caption=f"sealring's links take {links} of host memory besides.",
    )


def _by_size(found: Answer) -> Iterator[Table]:
    ways = [each.way for each in found.ways]
    if len(found.buckets) > 1:
        yield number_table(
            "DDP by bucket size",
            ("bucket_cap_mb", "all-reduces", *ways),
            (
                (
                    _bucket(row.bucket_mb, row.default),
                    row.all_reduces,
                    *(_time(row.seconds[way]) for way in ways),
                )
                for row in found.buckets
            ),
        )
    if found.algorithms:
        yield number_table(
            "Sealed all-reduce by size: the fastest algorithm, and sealring's choice",
            ("size", "fastest", "takes", "by default", "takes"),
            (
                (
                    human_bytes(each.bytes),
                    each.algorithm,
                    _time(each.seconds),
                    each.by_default,
                    _time(each.default_seconds),
                )
                for each in found.algorithms
            ),
        )


def show_sweep(found: list[Answer], as_json: bool) -> None:
    if as_json:
        print_json({"sweep": [each.as_json() for each in found]})
        return
    first = found[0]
    spread = {each.layout for each in found} != {"ddp"}
    columns = ["ranks", *(["layout"] if spread else [])]
    for each in first.ways:
        columns += [each.way, "", *([": plain"] if each.way != "plain" else [])]

    def cells(one: Answer) -> Iterator[str]:
        yield str(one.ranks)
        if spread:
            yield one.layout
        for each in one.ways:
            yield from (_time(each.seconds), _bar(each.compute_s / each.seconds))
            if each.way != "plain":
                yield f"{each.against_plain:.2f}"
        yield _time(one.forming_s)

    made = number_table(
        f"{first.model} on {first.profile}, {first.precision}, batch {first.batch} a rank",
        (*columns, "forms in"),
        (list(cells(each)) for each in found),
        caption="Bars: the part of a step that computes. Predicted, not measured.",
        narrow=True,
    )
    console.print(made)


def _bar(part: float) -> str:
    return "█" * round(min(1.0, part) * _BAR) or "▏"


# ---- predictions against measurements


def show_validation(found: Validation, as_json: bool) -> None:
    if as_json:
        print_json(found.as_json())
        return
    made = number_table(
        f"Predicted against measured: {found.profile.about}",
        ("case", "variant", "ranks", "bucket", "measured", "predicted", "error"),
        (
            (
                case.what
                if case.kind == "step"
                else f"all-reduce {human_bytes(case.bytes)}, {case.what}",
                case.variant,
                case.ranks,
                f"{case.bucket_mb:g}" if case.bucket_mb else "-",
                f"{_time(case.measured_s)} ±{case.spread:.0%}",
                _time(case.predicted_s),
                f"[bold]{case.error:+.0%}[/bold]{'*' if case.seen else ' '}",
            )
            for case in found.cases
        ),
        caption="*: the profile was fitted to this case, which does not count.",
        left=2,
        narrow=True,
    )
    console.print(made)
    for kind in ("step", "all_reduce"):
        error = found.median_error(kind)
        if error is not None:
            count = sum(case.kind == kind and not case.seen for case in found.cases)
            console.print(f"{kind}: median error {error:.1%} over {count} cases", highlight=False)


# ---- lists


def show_list(as_json: bool) -> None:
    counts = {name: load_model(name).count for name in MODELS}
    known = [load_profile(name) for name in profile_names()]
    networks = [load_network(name) for name in network_names()]
    if as_json:
        print_json({
            "models": counts,
            "profiles": {each.name: each.about for each in known},
            "networks": {each.name: each.about for each in networks},
        })  # fmt: skip
        return
    made = Table("", "name", "what it is")
    for name, count in counts.items():
        made.add_row("model", name, f"{count:,} parameters")
    for each in known:
        made.add_row("profile", each.name, f"{each.about} ({', '.join(each.ways())})")
    for link in networks:
        made.add_row("network", link.name, link.about)
    console.print(made)


def show_sources(known: Profile, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(known))
        return
    made = Table("figure", "value", "source", title=f"{known.name}: {known.about}")
    for part, holder in (
        ("device", known.device),
        *((way, known.way(way)) for way in known.ways()),
    ):
        for name, figure in _figures(holder):
            if figure != NOTHING:
                made.add_row(f"{part}.{name}", f"{figure.value:.6g}", figure.source)
    console.print(made)


def _figures(holder: Any) -> list[tuple[str, Figure]]:
    fields = [(field.name, getattr(holder, field.name)) for field in dataclasses.fields(holder)]
    return [(name, value) for name, value in fields if isinstance(value, Figure)]


def _bucket(mb: float | None, default: bool) -> str:
    return "-" if mb is None else f"{mb:g}{' (default)' if default else ''}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            shown = seconds * scale
            return f"{shown:,.0f} {unit}" if shown >= 100 else f"{shown:.3g} {unit}"
    raise AssertionError
