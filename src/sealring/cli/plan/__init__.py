"""`sealring plan`: what a training step will take, and cost, before anything is rented.

tables    what people read, and JSON for programs
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.plan import tables
from sealring.cli.terminal import progress_bar
from sealring.errors import ConfigurationError
from sealring.plan.answer import answer
from sealring.plan.fit_gpu import gpu_of
from sealring.plan.forming import forming_of
from sealring.plan.memory import ITEMSIZE
from sealring.plan.models import load_model, with_tokens
from sealring.plan.profiles import Profile, load_network
from sealring.plan.question import Answer, Question
from sealring.plan.reproduce import reproduce
from sealring.plan.timeline import Compute
from sealring.plan.tuning import machine
from sealring.plan.validate import computing, validate
from sealring.results import read_results


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A name, a parameter list (.json), or module:factory of your own."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks, one GPU (or process) each.")] = 8,
    profile: Annotated[
        str, typer.Option(help="A machine's name, a .toml file, or results.json of bench.")
    ] = "h200-sealring",
    per_host: Annotated[
        int | None, typer.Option(help="Ranks on one host; the machine's own number if left out.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts, instead of --per-host.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Between hosts: 100gbe, ndr400, wan, or a .toml file.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Per sample, for a model of your own: how often it uses a parameter."),
    ] = None,
    bucket_mb: Annotated[
        float | None, typer.Option(help="DDP's bucket_cap_mb; the best is found if left out.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Per GPU (rank) and hour.")] = None,
    compute_ms: Annotated[
        float | None, typer.Option(help="A step of one rank without communication, if measured.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="ranks=2..16384 (doubling) or ranks=2,4,8.")
    ] = None,
    validate_: Annotated[
        Path | None,
        typer.Option("--validate", help="Predicted against measured, for this results.json."),
    ] = None,
    reproduce_: Annotated[
        str | None, typer.Option("--reproduce", help="A published experiment: 2501.11771.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Where each figure of --profile comes from.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Models, profiles and networks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a training step on machines you don't have: time, memory, cost, best settings."""
    if list_:
        tables.show_list(as_json)
    elif sources:
        tables.show_sources(machine(profile), as_json)
    elif validate_ is not None:
        tables.show_validation(validate(read_results(validate_)), as_json)
    elif reproduce_ is not None:
        tables.show_reproduction(reproduce(reproduce_), as_json)
    elif model is None:
        raise ConfigurationError(
            "name a model, e.g. `sealring plan gpt2-xl --ranks 8`; --list shows which there are"
        )
    else:
        question = ask(
            model, ranks, profile, per_host, hosts, network, precision, batch, tokens, bucket_mb,
            price, compute_ms,
        )  # fmt: skip
        if sweep is not None:
            tables.show_sweep(_swept(question, hosts, parse_sweep(sweep)), as_json)
        else:
            tables.show_answer(answer(question), as_json)


def ask(
    model: str, ranks: int, profile: str, per_host: int | None, hosts: int | None,
    network: str | None, precision: str, batch: int | None, tokens: int | None,
    bucket_mb: float | None, price: float | None, compute_ms: float | None,
) -> Question:  # fmt: skip
    if precision not in ITEMSIZE:
        raise ConfigurationError(f"--precision is {precision!r}; it must be fp32, bf16 or fp16")
    if hosts is not None and per_host is not None:
        raise ConfigurationError("--hosts and --per-host say the same: give one of them")
    if hosts is not None and not 1 <= hosts <= max(1, ranks):
        raise ConfigurationError(f"{ranks} ranks on {hosts} hosts: every host has at least one")
    if compute_ms is not None and not 0 < compute_ms < 1e12:
        raise ConfigurationError(f"--compute-ms {compute_ms:g} is no time for a step")
    loaded, known = load_model(model), machine(profile)
    if tokens is not None:
        loaded = with_tokens(loaded, tokens)
    question = Question(
        loaded,
        known,
        load_network(network or known.network),
        ranks,
        _ranks_per_host(known, ranks, per_host, hosts),
        loaded.batch if batch is None else batch,
        precision,
        bucket_mb,
        price,
    )
    if compute_ms is not None:
        # A third forward, two thirds backward; the optimizer's part is small beside them.
        compute = Compute(compute_ms / 3e3, compute_ms / 1.5e3, 0.0)
        return dataclasses.replace(question, compute=compute)
    if profile.endswith(".json"):
        results = read_results(Path(profile))
        device = gpu_of(results) if known.device.kind == "gpu" else None
        measured = computing(
            results, model, question.batch, precision, question.cluster.per_host,
            device=device or "cpu",
        )  # fmt: skip
        formed = forming_of(results.scale, f"`sealring bench all`, {results.made}")
        return dataclasses.replace(question, compute=measured, forming=formed)
    return question


def _ranks_per_host(known: Profile, ranks: int, per_host: int | None, hosts: int | None) -> int:
    if hosts is not None:
        return -(-ranks // hosts)
    return int(known.device.ranks_per_host.value) if per_host is None else per_host


def parse_sweep(text: str) -> list[int]:
    """The numbers of ranks in "ranks=2..16384", which doubles, or "ranks=2,4,8"."""
    match = re.fullmatch(r"ranks=(?:(\d{1,6})\.\.(\d{1,6})|(\d{1,6}(?:,\d{1,6})*))", text)
    if match is None:
        raise ConfigurationError(f"--sweep is {text!r}; write ranks=2..16384 or ranks=2,4,8")
    if match[3] is not None:
        return [int(part) for part in match[3].split(",")]
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise ConfigurationError(f"--sweep {text} goes nowhere: the first must be 1 or more")
    worlds = [low]
    while worlds[-1] * 2 <= high:
        worlds.append(worlds[-1] * 2)
    return worlds


def _swept(question: Question, hosts: int | None, worlds: list[int]) -> list[Answer]:
    found = []
    with progress_bar("{task.completed:.0f}/{task.total}") as bar:
        task = bar.add_task("planning", total=len(worlds))
        for ranks in worlds:
            per_host = question.per_host if hosts is None else -(-ranks // hosts)
            found.append(answer(dataclasses.replace(question, ranks=ranks, per_host=per_host)))
            bar.advance(task)
    return found
