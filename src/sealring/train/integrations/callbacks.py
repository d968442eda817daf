"""The figures at every log of a framework, which is imported when its function is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from sealring.errors import ConfigurationError
from sealring.record.recording.hooks import count_step
from sealring.train.integrations.figures import Figures


def log_with_trainer(trainer: Any) -> None:
    """Adds this rank's figures to what HF's Trainer logs, for all of its reports (`report_to`).

    Called once, between making the Trainer and train().
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

    # Before the callbacks that report: add_callback would put it behind them.
    trainer.callback_handler.callbacks.insert(0, SealringFigures())


def lightning_callback() -> Any:
    """A callback for Lightning's Trainer: this rank's figures go to all of its loggers.

    They are logged as often as the Trainer logs (`log_every_n_steps`).
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
    """The first of them that is loaded already, or else the first that is installed."""
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            return module
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ConfigurationError(f"{names[0].split('.')[0]} is not installed here: pip install it")
