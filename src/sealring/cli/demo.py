"""`sealring demo`: sealed training, a wiretap that learns nothing, an attack that is caught."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from sealring.cli.bench import check_ranks
from sealring.cli.terminal import console, errors, print_json, progress_bar
from sealring.sealed_only.setting import refuse_to_measure

if TYPE_CHECKING:
    from sealring.audit.page import Beside
    from sealring.demo.recorded import Audited
    from sealring.demo.story import Outcome, Training


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps over each backend.")] = 200,
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the story.")] = False,
) -> None:
    """Train a small GPT over sealed links, tap a link, attack it, audit a recorded run.

    Exit status 1 if anything goes otherwise than sealring promises.
    """
    refuse_to_measure(os.environ)
    check_ranks(ranks)
    start = time.monotonic()
    # Loading torch takes a while, and --help needs none of it.
    from sealring.demo import pictures
    from sealring.demo.recorded import surprises
    from sealring.demo.story import Attacked, Outcome, Tapped, Training, perform

    def show(*pictures: Any) -> None:
        if not json:
            console.print(*pictures, sep="\n", highlight=False)

    training, tapped, attacked = Training(ranks, steps), None, None
    show(*pictures.opening(ranks, steps))
    progress = _progress(ranks, steps, json)
    with contextlib.closing(perform(ranks, steps)) as events, progress:
        for event in events:
            match event:
                case Training():
                    training = event
                    progress.show(training)
                case Tapped():
                    tapped = event
                    progress.stop()
                    show(*pictures.training(training), *pictures.wiretap(tapped))
                case Attacked():
                    attacked = event
                    show(*pictures.attack(attacked))
    if tapped is None or attacked is None:
        raise RuntimeError("the workers ended before the demo did")
    show(*pictures.comparison(training))
    audited = _audits(ranks, pictures.costs(training))
    show(*pictures.audits(audited))
    outcome = Outcome(training, tapped, attacked, surprises(audited))
    seconds = time.monotonic() - start
    show(*pictures.verdict(outcome, seconds), str(audited[-1].page))
    if json:
        print_json(
            _as_json(outcome, seconds) | {"audits": [_audit_as_json(one) for one in audited]}
        )
    if outcome.surprises():
        raise typer.Exit(1)


def _audits(ranks: int, costs: Beside) -> list[Audited]:
    """The recorded runs. Their records and pages are kept, for people to look at."""
    from sealring.demo.recorded import perform_recorded

    place, found = Path(tempfile.mkdtemp(prefix="sealring-demo-")), []
    try:
        with errors.status("") as status:
            for event in perform_recorded(ranks, place, costs):
                if isinstance(event, str):
                    status.update(event)
                else:
                    found.append(event)
    finally:
        shutil.rmtree(place / "vault", ignore_errors=True)
        (place / "vault.key").unlink(missing_ok=True)
    return found


def _audit_as_json(audited: Audited) -> dict[str, Any]:
    return {
        "run": audited.name,
        "ranks": audited.ranks,
        "status": audited.status,
        "findings": audited.findings,
        "page": str(audited.page),
    }


class _Progress(Protocol):
    def show(self, training: Training) -> None: ...
    def stop(self) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...


def _progress(ranks: int, steps: int, json: bool) -> _Progress:
    if errors.is_terminal:
        return _Bar(ranks, steps)
    return _Lines(every=steps + 1 if json else max(1, steps // 10))


class _Bar:
    def __init__(self, ranks: int, steps: int) -> None:
        self._bar = progress_bar("loss {task.fields[loss]}", "{task.fields[rate]} GB/s sealed")
        self._task = self._bar.add_task(
            f"starting {ranks} workers", total=steps, loss="   ", rate="   "
        )

    def show(self, training: Training) -> None:
        if not (curve := training.curves["sealring"]):
            return
        self._bar.update(
            self._task,
            description="training" if training.done < training.steps else "tapping a link",
            completed=training.done,
            loss=f"{curve[-1].loss:.3f}",
            rate=f"{training.sealed_rate() / 1e9:.3f}",
        )

    def stop(self) -> None:
        self._bar.stop()

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _Lines:
    """For logs and pipes: a plain line every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._started: float | None = None

    def show(self, training: Training) -> None:
        done = int(training.done)
        if training.done != done or not done:
            return
        now = time.monotonic()
        if self._started is None:
            self._started = now  # the first step's time is not known, so the rest is counted
            return
        if done % self._every == 0:
            left = (now - self._started) / (done - 1) * (training.steps - done)
            console.print(
                f"step {done}/{training.steps}  loss {training.curves['sealring'][-1].loss:.3f}  "
                f"{training.sealed_rate() / 1e9:.3f} GB/s sealed  {left:.0f} s left",
                highlight=False,
            )

    def stop(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _as_json(outcome: Outcome, seconds: float) -> dict[str, Any]:
    training, tapped, attacked = outcome.training, outcome.tapped, outcome.attacked
    flipped = attacked.flipped
    return {
        "as_promised": not outcome.surprises(),
        "surprises": outcome.surprises(),
        "seconds": round(seconds, 1),
        "ranks": training.ranks,
        "steps": training.steps,
        "training": {
            "backends": {
                backend: {
                    "step_ms": round(training.time_per_step(backend).median * 1e3, 2),
                    "first_loss": curve[0].loss,
                    "final_loss": training.final_loss(backend),
                }
                for backend, curve in training.curves.items()
            },
            "overhead": round(training.overhead, 4),
            "largest_loss_difference": training.largest_difference(),
            "sealed_bytes": training.sealed_bytes,
        },
        "wiretap": {
            "link": [tapped.listener, tapped.lured],
            "bytes_seen": tapped.bytes_seen,
            "setup_bytes": tapped.setup_bytes,
            "records": tapped.records,
            "searched_bytes": tapped.searched_bytes,
            "entropy": round(tapped.entropy, 5),
            "plaintext_entropy": round(tapped.plaintext_entropy, 5),
            "longest_plaintext_run": tapped.longest_run,
        },
        "attack": {
            "flipped": flipped is not None,
            "collective": flipped.record.fields["collective"] if flipped else None,
            "caught_by": attacked.caught_by,
            "weights_intact": attacked.weights_intact,
            "endings": [
                {
                    "rank": rank,
                    "whole_steps": ending.whole_steps,
                    "raised": ending.raised,
                    "error": ending.error,
                    "message": ending.message,
                    "reported_by": ending.reported_by,
                    "milliseconds": round(attacked.milliseconds(rank), 1),
                }
                for rank, ending in sorted(attacked.endings.items())
            ],
        },
    }
