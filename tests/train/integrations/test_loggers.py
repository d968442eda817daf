"""The figures in a real TensorBoard writer, and in the callbacks of real Trainers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sealring.errors import ConfigurationError
from sealring.observe import process
from sealring.observe.metrics import EndedGroups
from sealring.observe.process import keep
from sealring.train.integrations import Figures, lightning_callback, log_with_trainer
from tests.observe.test_flight import CountingEngine, recorder, run

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' warnings about themselves


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> CountingEngine:
    """Registers one group, whose engine only counts."""
    monkeypatch.setattr(process, "_recorders", [])
    monkeypatch.setattr(process, "_ended", EndedGroups())
    counting = CountingEngine()
    flight = recorder(counting)
    keep(flight)
    run(flight, 1)
    counting.sealed, counting.opened = 1000, 900
    return counting


def test_figures_are_totals_and_rates(engine: CountingEngine) -> None:
    figures = Figures()
    first = figures()
    assert first["sealring/sealed_bytes"] == 1000.0
    assert first["sealring/collectives"] == 1.0
    assert first["sealring/wait_seconds"] == 0.75
    assert first["sealring/wait_seconds/rank_6"] == 0.25
    assert first["sealring/groups"] == 1.0
    assert "sealring/sealed_bytes_per_second" not in first
    engine.sealed += 500
    second = figures()
    assert second["sealring/sealed_bytes"] == 1500.0
    assert second["sealring/sealed_bytes_per_second"] > 0
    assert second["sealring/opened_bytes_per_second"] == 0
    assert all(type(value) is float for value in second.values())


def test_no_framework_is_imported_for_the_figures() -> None:
    import subprocess

    code = (
        "import sys, sealring.train.integrations\n"
        "print([m for m in ('torch', 'transformers', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match="lightning is not installed"):
        lightning_callback()


def test_tensorboard_keeps_every_figure(tmp_path: Path) -> None:
    events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    figures = Figures()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2):
            last = figures()
            for name, value in last.items():
                writer.add_scalar(name, value, step)
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(last)
    assert [event.value for event in read.Scalars("sealring/sealed_bytes")] == [1000.0, 1000.0]


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1) * index}


def test_trainer_reports_the_figures_with_its_own_logs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    reported: list[dict[str, Any]] = []

    class Report(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            reported.append(dict(logs))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    trainer = transformers.Trainer(
        model=Model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        ),
        train_dataset=Squares(),
        callbacks=[Report()],
    )  # fmt: skip
    log_with_trainer(trainer)
    trainer.train()
    steps = [each for each in reported if "loss" in each]
    assert [each["sealring/sealed_bytes"] for each in steps] == [1000.0, 1000.0]


def test_lightning_logs_the_figures_to_its_loggers(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    loggers: Any = pytest.importorskip("lightning.pytorch.loggers")

    class Model(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.layer(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logger = loggers.CSVLogger(tmp_path)
    lightning.Trainer(
        max_steps=2, log_every_n_steps=1, accelerator="cpu", devices=1, logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning_callback()],
    ).fit(Model(), torch.utils.data.DataLoader(Squares(), batch_size=4))  # fmt: skip
    written = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "sealring/sealed_bytes" in written
    assert "1000.0" in written
