"""`sealring bench vault`: every case is measured, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError
from sealring.lab.bench import vault
from sealring.vault import Dataset, Loader, Stream


def test_every_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "RESHARDING", (2, 1))
    told: list[str] = []
    cases = list(vault.measure_vault(tmp_path, 4 << 20, [1], 2, told.append))
    assert [(case.what, case.ranks) for case in cases] == [
        ("AES alone", 1),
        ("SHA-256 alone", 1),
        ("BLAKE3 alone", 1),
        ("sealing alone", 1),
        ("opening alone", 1),
        ("save", 1),
        ("load", 1),
        ("load from disk", 1),
        ("reshard 2 to 1", 1),
    ]
    for case in cases:
        assert case.sealed_gb_s > 0
        assert case.ratio == case.sealed_gb_s / case.plain_gb_s
    assert [case.bytes_read for case in cases[:6]] == [None] * 6
    for case in cases[6:]:
        assert case.bytes_needed == 4 << 20
        assert case.bytes_read is not None
        assert case.bytes_needed < case.bytes_read <= 1.05 * case.bytes_needed
    assert list(tmp_path.iterdir()) == []
    assert told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "from 1 to"),
        (["--ranks", "1,x"], "from 1 to"),
        (["--directory", "/nowhere"], "can be written"),
        (["--size", "big"], "big"),
        (["--only", "nothing"], "there is checkpoints, datasets, gpu"),
    ],
)
def test_bad_options_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "vault", *options])
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)


def test_datasets_are_measured_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    seen: dict[str, int] = {}

    def load_sealed(dataset: Dataset) -> None:
        stream = Stream(dataset, batch_size=vault.BATCH, rank=0, world=1)
        seen["sealed"] = sum(int(batch["tokens"].sum()) for batch in Loader(stream))

    def load_plain(path: Path) -> None:
        loader = DataLoader(vault.mapped_tokens(path), batch_size=vault.BATCH)
        seen["plain"] = sum(int(batch["tokens"].sum()) for batch in loader)

    monkeypatch.setattr(vault, "_load_sealed", load_sealed)
    monkeypatch.setattr(vault, "_load_plain", load_plain)
    cases = list(vault.measure_datasets(tmp_path, 1 << 20, 1, lambda text: None))
    assert [case.what for case in cases] == ["dataset read, a core", "samples, shuffled"]
    assert all(case.ratio == case.sealed_gb_s / case.plain_gb_s > 0 for case in cases)
    assert seen["sealed"] == seen["plain"] > 0
    assert list(tmp_path.iterdir()) == []
    assert os.sched_getaffinity(0) == allowed
