"""Outputs that other libraries write, where the disk takes no more of them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sealring.errors import ConfigurationError
from sealring.vault import (
    CheckpointReader,
    CheckpointWriter,
    Vault,
    export_safetensors,
    export_torch,
)
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
