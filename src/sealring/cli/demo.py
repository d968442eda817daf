"""`sealring demo`: sealed training, a wiretap that learns nothing, an attack that is detected."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.bench import check_ranks
from sealring.cli.options import AsJson
from sealring.cli.terminal import console, errors, print_json, progress_bar, say
from sealring.core.sealed_only.setting import refuse_to_measure

if TYPE_CHECKING:
    from sealring.lab.demo.story import DemoOutcome, Training
    from sealring.lab.demo.train import AuditedRun
    from sealring.record.audit.page import Beside


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps over each backend.")] = 200,
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 4,
    json: AsJson = False,
) -> None:
    """Train a small GPT over sealed links, tap a link, attack it, audit a recorded run.

    Exit status 1 if anything goes otherwise than sealring promises.
    """
    refuse_to_measure(os.environ)
    check_ranks(ranks)
    start = time.monotonic()
    # Imported here, because loading torch takes a while and --help does not need it.
    from sealring.lab.demo import story
    from sealring.lab.demo.story import Attacked, DemoOutcome, Tapped, Training, perform
    from sealring.lab.demo.train import surprises

    def show(*pictures: Any) -> None:
        if not json:
            console.print(*pictures, sep="\n", highlight=False)

    training, tapped, attacked = Training(ranks, steps), None, None
    show(*story.opening(ranks, steps))
    progress = _Progress(ranks, steps, json)
    with contextlib.closing(perform(ranks, steps)) as events, progress.bar:
        for event in events:
            match event:
                case Training():
                    training = event
                    progress.show(training)
                case Tapped():
                    tapped = event
                    progress.bar.stop()
                    show(*story.training(training), *story.wiretap(tapped))
                case Attacked():
                    attacked = event
                    show(*story.attack(attacked))
    if tapped is None or attacked is None:
        raise RuntimeError("the workers ended before the demo did")
    show(*story.comparison(training))
    audited = _audits(ranks, story.costs(training))
    show(*story.audits(audited))
    outcome = DemoOutcome(training, tapped, attacked, surprises(audited))
    seconds = time.monotonic() - start
    show(*story.verdict(outcome, seconds), str(audited[-1].page))
    if json:
        audits = [{**asdict(one), "page": str(one.page)} for one in audited]
        print_json(_as_json(outcome, seconds) | {"audits": audits})
    if outcome.surprises():
        raise typer.Exit(1)


def _audits(ranks: int, costs: Beside) -> list[AuditedRun]:
    """Performs the recorded runs. Keeps their records and pages, so that users can look at them."""
    from sealring.lab.demo.train import perform_recorded

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


class _Progress:
    """A progress bar; in logs and pipes, a plain line every few steps."""

    def __init__(self, ranks: int, steps: int, json: bool) -> None:
        self.bar = progress_bar("loss {task.fields[loss]}", "{task.fields[rate]} GB/s sealed")
        self._task = self.bar.add_task(
            f"starting {ranks} workers", total=steps, loss="   ", rate="   "
        )
        self._every = steps + 1 if json or errors.is_terminal else max(1, steps // 10)
        self._started: float | None = None

    def show(self, training: Training) -> None:
        if not (curve := training.curves["sealring"]):
            return
        loss, rate = f"{curve[-1].loss:.3f}", f"{training.sealed_rate() / 1e9:.3f}"
        description = "training" if training.done < training.steps else "tapping a link"
        self.bar.update(
            self._task, description=description, completed=training.done, loss=loss, rate=rate
        )
        done, now = int(training.done), time.monotonic()
        if self._started is None and done:
            self._started = now  # counted from here, as the first step's time is not known
        elif self._started is not None and training.done == done and done % self._every == 0:
            left = (now - self._started) / (done - 1) * (training.steps - done)
            say(f"step {done}/{training.steps}  loss {loss}  {rate} GB/s sealed  {left:.0f} s left")


def _as_json(outcome: DemoOutcome, seconds: float) -> dict[str, Any]:
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
                    **asdict(ending),
                    "milliseconds": round(attacked.milliseconds(rank), 1),
                }
                for rank, ending in sorted(attacked.endings.items())
            ],
        },
    }
