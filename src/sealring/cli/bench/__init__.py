"""`sealring bench`: measures what protection costs on this machine.

Benchmarks that only this project needs are in sealring.lab.__main__, which uses the options, the
progress bar and the tables of this module.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer

from sealring.cli.bench import tables
from sealring.cli.options import AsJson, parse_bytes
from sealring.cli.terminal import console, errors, print_json, progress_bar, say
from sealring.core.group.settings import read_settings
from sealring.core.sealed_only.setting import refuse_to_measure
from sealring.errors import ConfigurationError, WorkerFailed
from sealring.formats.files import writing
from sealring.lab.bench import step as training
from sealring.lab.bench import suite
from sealring.lab.bench.collectives import Effort, row
from sealring.lab.bench.gpu import rows_of
from sealring.lab.bench.harness import BenchJob, BenchSession, aes_rate
from sealring.lab.bench.step import WIDTHS, Precision, StepSetting, count_of, training_bytes
from sealring.lab.bench.vault import Case, measure_datasets, measure_on_gpu, measure_vault
from sealring.lab.bench.workers import CPU, SHARED_GPU, WorkerPlace, find_place
from sealring.lab.report.page import headline, write_page
from sealring.lab.results import read_results

app = typer.Typer(help="Measure what protection costs on this machine.", no_args_is_help=True)

Blocks = Annotated[int, typer.Option(min=3, help="Timed blocks of each variant.")]
Kept = Annotated[Path | None, typer.Option("--results", help="Write every sample to this file.")]
Sizes = Annotated[str, typer.Option(help="Tensor sizes: 4096, 4KiB, 25MiB.")]
Variants = Annotated[str, typer.Option(help="Of plain (Gloo), sealed, cc (GPU-TEE, emulated).")]
Worlds = Annotated[str, typer.Option(help="Numbers of workers on this machine.")]


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure what protection costs on this machine."""
    if context.invoked_subcommand != "report":
        refuse_to_measure(os.environ)


@app.command()
def allreduce(
    ranks: Worlds = "2",
    size: Sizes = "25MiB",
    variants: Variants = "plain,sealed",
    blocks: Blocks = 15,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """Sealed all-reduce against torch's plaintext Gloo, alternately in one run (medians)."""
    wanted = ("plain", *(each for each in parse_variants(variants) if each in ("sealed", "cc")))
    jobs = suite.collectives(
        "allreduce",
        ["all_reduce"],
        parse_world_sizes(ranks),
        several(size, parse_size),
        chosen_transport(),
        wanted,
        Effort(blocks),
    )
    show_exchanges(jobs, results, json)


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Names, e.g. gpt-small,mlp,gpt2.")] = "gpt-small",
    ranks: Worlds = "2,4",
    bucket_cap_mb: Annotated[str, typer.Option(help="DDP's buckets, in MB: 1,25,100.")] = "25",
    batch: Annotated[
        str | None, typer.Option(help="Samples a rank; each model has a default.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of weights and gradients: fp32, bf16.")] = "fp32",
    variants: Annotated[
        str, typer.Option(help="Of compute (no DDP), plain (torch's own), sealed, cc (emulated).")
    ] = "plain,sealed",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: GPUs where there are any, in turn.")
    ] = "cpu",
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each variant.")] = 11,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of one sealed step on rank 0; for one --ranks."),
    ] = None,
    results: Kept = None,
    json: AsJson = False,
) -> None:
    """A DDP training step, sealed against torch's own backend, alternately (medians)."""
    worlds = parse_world_sizes(ranks)
    settings = settings_of(
        several(model, str),
        several(batch, parse_batch) if batch else None,
        several(precision, parse_precision),
        several(bucket_cap_mb, parse_bucket),
    )
    wanted = parse_variants(variants)
    if trace is not None and len(worlds) > 1:
        raise ConfigurationError(f"one trace shows one world: pass --ranks {worlds[0]}")
    check_writable(trace)
    place = find_place(device)
    check_variants(wanted, place)
    for world in worlds:
        check_memory(settings, world, len(wanted), place)
    jobs = suite.steps(
        training.Work(
            world,
            settings,
            wanted,
            steps,
            chosen_transport(),
            trace,
            place,
            read_settings(os.environ).gpu_wire,
        )
        for world in worlds
    )
    measured, status = measure(jobs, results)
    cases = [case for case in measured if case.ranks > 1]
    shared = [SHARED_GPU] if any(place.shared_by(case.ranks) for case in cases) else []
    rows = [training.row(case) for case in cases]
    shown = [tables.steps(cases, shared), tables.splits(cases)] if cases else []
    show({"device": place.name, "notes": shared, "cases": rows}, json, shown)
    end(status)


@app.command()
def vault(
    size: Annotated[str, typer.Option(help="Of checkpoint and dataset: 64MiB.")] = "256MiB",
    ranks: Annotated[str, typer.Option(help="Numbers of workers that save and load.")] = "1,2",
    only: Annotated[
        str, typer.Option(help="Some of checkpoints, datasets, gpu: what a GPU opens and parks.")
    ] = "checkpoints,datasets",
    blocks: Annotated[int, typer.Option(min=1, help="Timed blocks of each variant.")] = 5,
    directory: Annotated[Path, typer.Option(help="On the file system to measure.")] = Path(),
    json: AsJson = False,
) -> None:
    """Checkpoints and datasets, sealed against torch's own, alternately (medians)."""
    parts = several(only, lambda one: one_of(("checkpoints", "datasets", "gpu"), one, "a part"))
    if not os.access(directory, os.W_OK):
        raise ConfigurationError(f"{directory} is not a directory that can be written to")
    worlds = several(ranks, int) if re.fullmatch(r"\d{1,2}(,\d{1,2})*", ranks) else []
    if not worlds or min(worlds) < 1 or max(worlds) > _MAX_VAULT_RANKS:
        raise ConfigurationError(
            f"--ranks {ranks!r}: write numbers from 1 to {_MAX_VAULT_RANKS}, as 1,2"
        )
    with errors.status("starting") as status:
        cases: list[Case] = []
        if "checkpoints" in parts:
            cases += measure_vault(directory, parse_size(size), worlds, blocks, status.update)
        if "datasets" in parts:
            cases += measure_datasets(directory, parse_size(size), blocks, status.update)
        if "gpu" in parts:
            cases += measure_on_gpu(find_place("cuda"), directory, blocks, status.update)
    show({"cases": [asdict(case) for case in cases]}, json, [tables.vault(cases)])


@app.command("all")
def everything(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and samples: minutes instead of an hour.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Some of its parts: aead,link,allreduce,collectives,step,scale,gpu."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The directory for both files; made if missing.")
    ] = Path(),
) -> None:
    """All of it, into results.json with every sample and report.html, which explains them."""
    parts = suite.everything(quick=quick)
    wanted = several(only, lambda one: one_of(list(parts), one, "a part")) if only else list(parts)
    with writing(output, "made"):
        output.mkdir(parents=True, exist_ok=True)
    session = new_session(output / "results.json")
    status = run(session, [job for name in wanted for job in parts[name]])
    if (table := tables.summary(session.measured)).row_count:
        console.print(table)
    found = session.results(session.stopped)
    if rows := rows_of(found):
        console.print(tables.gpu(", ".join(dict.fromkeys(found.machine.gpus)), rows))
    write_page(output / "report.html", found)
    say(f"{output / 'results.json'} and {output / 'report.html'}: written.")
    end(status)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="results.json; two of them are compared.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the page goes; replaced if there.")
    ] = Path("report.html"),
) -> None:
    """Explain a bench run, or compare two, as one HTML file that opens offline."""
    if len(results) > 2:
        raise ConfigurationError(
            f"a page shows one or two results, and here are {len(results)}: leave some out"
        )
    read = [read_results(path) for path in results]
    write_page(output, *read)
    for path, each in zip(results, read, strict=True):
        say(f"{path}: {headline(each)}")
    say(f"{output} is written; open it in a browser.")


# ---- parsing and checking options


_MAX_RANKS: Final = 64
_MAX_VAULT_RANKS: Final = 16
_MAX_BUCKET_MB: Final = 1 << 20
VARIANTS: Final = ("compute", "plain", "sealed", "cc")
Value = TypeVar("Value")


def several(text: str, one: Callable[[str], Value]) -> list[Value]:
    """Parses a comma-separated list; each value appears once."""
    return list(dict.fromkeys(one(part.strip()) for part in text.split(",")))


def parse_size(text: str) -> int:
    """Parses a number of bytes, which must be a multiple of 4: the benchmark reduces float32."""
    size = parse_bytes(text)
    if size % 4:
        raise ConfigurationError(f"a size of {size} bytes is not a whole number of float32 values")
    return size


def parse_world_sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigurationError(f"{text!r} is not a list of world sizes; write 2,3,4,8")
    return several(text, lambda part: check_ranks(int(part)))


def check_ranks(ranks: int) -> int:
    if not 2 <= ranks <= _MAX_RANKS:
        raise ConfigurationError(f"{ranks} ranks: the benchmark runs 2 to {_MAX_RANKS} of them")
    return ranks


def chosen_transport() -> str:
    """The transport by SEALRING_TRANSPORT, where auto means shm: all ranks are on this machine."""
    chosen = read_settings(os.environ).transport
    return "shm" if chosen == "auto" else chosen


def parse_variants(text: str) -> tuple[str, ...]:
    """The wanted variants in a fixed order. `sealed` is always among them."""
    wanted = {*several(text, lambda name: one_of(VARIANTS, name, "a variant")), "sealed"}
    return tuple(name for name in VARIANTS if name in wanted)


def parse_bucket(text: str) -> float:
    try:
        bucket = float(text)
    except ValueError:
        bucket = 0.0
    if not 0 < bucket <= _MAX_BUCKET_MB:
        raise ConfigurationError(
            f"a bucket of {text!r} MB holds no gradient; DDP's own default is 25"
        )
    return bucket


def parse_batch(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ConfigurationError(f"a batch of {text!r} samples cannot be trained; write 1 or more")
    return int(text)


def parse_precision(text: str) -> Precision:
    if text not in WIDTHS:  # written out, so that mypy knows the type
        raise ConfigurationError(f"{text!r} is not a precision; there is {', '.join(WIDTHS)}")
    return text


def settings_of(
    models: Sequence[str],
    batches: Sequence[int] | None,
    precisions: Sequence[Precision],
    buckets: Sequence[float],
) -> tuple[StepSetting, ...]:
    from sealring.lab.bench.models import find

    return tuple(
        StepSetting(model, batch, precision, bucket)
        for model in models
        for batch in batches or [find(model).batch]
        for precision in precisions
        for bucket in buckets
    )


def check_memory(
    settings: Sequence[StepSetting], ranks: int, trainees: int, place: WorkerPlace = CPU
) -> None:
    """Raises ConfigurationError for work that would run out of memory after some minutes."""
    available = place.free_bytes()
    on_gpu = place.kind == "cuda"
    together = -(-ranks // place.gpus) if on_gpu else ranks
    where = f" of one {place.name}" if on_gpu else ""
    fewer = ", a smaller model, or --variants plain,sealed"
    way_out = fewer if trainees > 1 else " or a smaller model"
    for setting in settings:
        parameters = count_of(setting.model)
        needed = together * trainees * training_bytes(setting.model, setting.precision)
        if needed > available:
            raise ConfigurationError(
                f"{together} ranks of {setting.model} ({parameters:,} parameters, {trainees} "
                f"variants at once) need {needed / 2**30:.1f} GiB{where} and "
                f"{available / 2**30:.1f} GiB are free: take fewer ranks{way_out}"
            )


def check_variants(variants: Sequence[str], place: WorkerPlace) -> None:
    if place.kind == "cuda" and "cc" in variants:
        raise ConfigurationError(
            "cc emulates the GPU-TEE path on CPUs and has no GPU: leave it out of --variants, or "
            "take --device cpu"
        )


def one_of(known: Sequence[str], name: str, what: str) -> str:
    if name not in known:
        raise ConfigurationError(f"{name!r} is not {what}; there is {', '.join(known)}")
    return name


def check_writable(path: Path | None) -> Path | None:
    """Raises ConfigurationError now, not after the measurement, if the folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: there is no directory {path.parent}")
    return path


# ---- a run, its progress bar, and stopping it


_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run besides Ctrl-C: a scheduler's, and that of a closed terminal."""


class _Stopped(BaseException):
    """Raised when one of these signals comes."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def measure(jobs: Sequence[BenchJob], results: Path | None) -> tuple[list[Any], int | None]:
    """Runs jobs; returns what was measured, and the exit status if the run was stopped."""
    session = new_session(check_writable(results))
    status = run(session, jobs)
    return session.measured, status


def show_exchanges(jobs: Sequence[BenchJob], results: Path | None, json: bool) -> None:
    """Measures collectives, and shows each with its lower bound and whether it meets its target."""
    rate = aes_rate()
    measured, status = measure(jobs, results)
    rows = [row(exchange, rate) for exchange in measured]
    show({"cases": rows}, json, [tables.exchanges(measured, rows)] if rows else [])
    end(status)


def new_session(path: Path | None = None) -> BenchSession:
    return BenchSession(" ".join(["sealring", *sys.argv[1:]]), path)


def run(session: BenchSession, jobs: Sequence[BenchJob]) -> int | None:
    """Measures with a progress bar. Returns the exit status if the run was stopped, else None.

    If a user stops the run, what was measured so far is printed, and written to the file if there
    is one.
    """
    total = sum(job.count for job in jobs)
    try:
        with _signals_stop(), progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
            task = bar.add_task("starting", total=total)
            said: list[str] = []

            def tell(done: float, label: str) -> None:
                bar.update(task, completed=done, description=label)
                # In a log, which has no bar, each job prints a line when it begins.
                if not errors.is_terminal and label not in said:
                    said.append(label)
                    errors.print(f"{done:.0f}/{total} {label}", markup=False, highlight=False)

            session.run(jobs, tell)
    except (KeyboardInterrupt, _Stopped) as stop:
        by = stop.signal if isinstance(stop, _Stopped) else signal.SIGINT
        _keep(session, f"stopped by {'Ctrl-C' if by is signal.SIGINT else by.name}", total)
        return 128 + by
    except WorkerFailed:
        _keep(session, "a worker failed", total)
        raise
    return None


def _keep(session: BenchSession, why: str, total: int) -> None:
    told = f"{why} after {len(session.measured)} of {total} cases"
    session.save(told)
    where = f"; they are in {session.path}" if session.path is not None else ""
    errors.print(f"{told}{where}", markup=False, highlight=False, soft_wrap=True)


def show(value: Any, json: bool, shown: Sequence[Any]) -> None:
    """Prints JSON for programs, or else tables for people."""
    if json:
        print_json(value)
    else:
        console.print(*shown, sep="\n")


def end(status: int | None) -> None:
    if status is not None:
        raise typer.Exit(status)


@contextmanager
def _signals_stop() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped(number)

    # A signal that nohup has set to be ignored stays ignored.
    before = {each: signal.getsignal(each) for each in _ENDS}
    taken = {each: old for each, old in before.items() if old is not signal.SIG_IGN}
    for each in taken:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, old in taken.items():
            signal.signal(each, old)
