"""Outputs that other libraries write, where the disk takes no more of them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from sealring.errors import ConfigurationError, NoSuchObject
from sealring.vault import (
    CheckpointReader,
    CheckpointWriter,
    Vault,
    export_safetensors,
    export_torch,
)
from sealring.vault.datasets.parquet_files import seal_parquet
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@contextmanager
def small_files(largest: int) -> Iterator[None]:
    """Writes beyond this fail in the kernel, as on a full disk. Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("export", [export_torch, export_safetensors])
def test_an_export(
    export: object, vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save said that it was at an unexpected position in the file."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    dcp.save({"weight": torch.ones(500_000)}, storage_writer=CheckpointWriter(vault, "run"))
    before = set(tmp_path.iterdir())
    out = tmp_path / "out"
    assert callable(export)
    with (
        small_files(1 << 20),
        pytest.raises(ConfigurationError, match=f"^{out} cannot be written: File too large$"),
    ):
        export(CheckpointReader(vault, "run"), out)
    assert set(tmp_path.iterdir()) == before
    export(CheckpointReader(vault, "run"), out)


def test_encrypted_parquet(vault: Vault, tmp_path: Path) -> None:
    """It was BadSource: the source could not be read as Parquet."""
    arrow = pytest.importorskip("pyarrow")
    source, out = tmp_path / "a.parquet", tmp_path / "out"
    numbers = np.random.default_rng(1).integers(0, 1 << 60, 300_000)
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"number": numbers}), source)
    before = set(tmp_path.iterdir())
    with (
        small_files(1 << 20),
        pytest.raises(
            ConfigurationError, match=f"^{out / source.name} cannot be written: File too large$"
        ),
    ):
        seal_parquet(vault, source, out, "tables", lambda _: None)
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(NoSuchObject):
        vault.find("tables")
    assert seal_parquet(vault, source, out, "tables", lambda _: None)
