"""Integrations with training frameworks, beyond process groups.

This module gives the counts of this process as one flat dictionary, which every logger accepts. It
also adds them to the logs of HF's Trainer and of Lightning, which are imported only when needed.

torchft        a sealed Manager for torchft, which must be installed
replica_ranks  the ranks of workers in a job of torchft
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any, Final

from sealring.errors import ConfigurationError
from sealring.observe.metrics import COUNTERS
from sealring.observe.process import counts_of_all_groups, recorders
from sealring.record.recording.run import count_step

__all__ = ["Figures", "lightning_callback", "log_with_trainer"]

MOST_PEERS: Final = 64
"""With more peers, only the sum of the waiting times is given."""


class Figures:
    """Call this object at every log: returns the counts of all groups, and rates since the last
    call.

    Use wandb.log(figures()), or writer.add_scalar for each name and value.
    """

    def __init__(self, prefix: str = "sealring/") -> None:
        self._prefix = prefix
        self._last: tuple[float, float, float] | None = None

    def __call__(self) -> dict[str, float]:
        totals = {metric.plain_name: 0.0 for metric in COUNTERS}
        by_peer: dict[int, float] = {}
        for series, value in counts_of_all_groups().items():
            totals[series.metric] += value
            if series.metric == "wait_seconds":
                peer = int(series.label)
                by_peer[peer] = by_peer.get(peer, 0.0) + value
        found = {**totals, "groups": float(sum(not each.closed for each in recorders()))}
        if len(by_peer) <= MOST_PEERS:
            for peer, seconds in sorted(by_peer.items()):
                found[f"wait_seconds/rank_{peer}"] = seconds
        found |= self._rates(totals["sealed_bytes"], totals["opened_bytes"])
        return {f"{self._prefix}{name}": value for name, value in found.items()}

    def _rates(self, sealed: float, opened: float) -> dict[str, float]:
        now = time.monotonic()
        last, self._last = self._last, (now, sealed, opened)
        if last is None or now <= last[0]:
            return {}
        seconds = now - last[0]
        return {
            "sealed_bytes_per_second": (sealed - last[1]) / seconds,
            "opened_bytes_per_second": (opened - last[2]) / seconds,
        }


# ---- for frameworks, which are imported when their functions are called


def log_with_trainer(trainer: Any) -> None:
    """Adds this rank's figures to the logs of HF's Trainer, for all its reports (`report_to`).

    Call it once, between making the Trainer and train().
    """
    transformers = _imported("transformers")
    figures = Figures()

    class SealringFigures(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            count_step()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
        ) -> None:
            if logs is not None:
                logs.update(figures())

    # First, so that it runs before the callbacks that report.
    trainer.callback_handler.callbacks.insert(0, SealringFigures())


def lightning_callback() -> Any:
    """Returns a callback for Lightning's Trainer that gives this rank's figures to all its loggers.

    The figures are logged as often as the Trainer logs (`log_every_n_steps`).
    """
    lightning = _imported("lightning.pytorch", "pytorch_lightning")
    figures = Figures()

    class SealringFigures(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            count_step(trainer.global_step)
            if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
                found = figures()
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=trainer.global_step)

    return SealringFigures()


def _imported(*names: str) -> Any:
    """The first of these modules that is loaded already, else the first that is installed."""
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            return module
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ConfigurationError(f"{names[0].split('.')[0]} is not installed here: pip install it")
