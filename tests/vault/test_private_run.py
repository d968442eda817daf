"""The private run of docs/vault.md, as it is written there, from sealed data to the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vault.md"


def test_from_sealed_data_to_an_exported_model(tmp_path: Path) -> None:
    block = (
        PAGE.read_text().split("<!-- private run -->")[1].split("<!-- end of private run -->")[0]
    )
    commands = block.split("```sh\n")[1].split("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env={**clean, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=115,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = re.findall(r"resumed at (\d+)\nworkers (\d+)", done.stdout)
    assert resumed == [("0", "2"), ("6", "1")]
    steps = re.findall(r"step +(\d+)  loss", done.stdout)
    assert steps == [str(step) for step in range(1, 11)]
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert exported["step"] == 10
    assert exported["model"]["0.tokens.weight"].shape == (256, 64)
    # Nothing of the data or of the weights lies in the vault as it is.
    weights = exported["model"]["0.tokens.weight"].numpy().tobytes()
    words = (tmp_path / "corpus.txt").read_bytes()
    for file in (tmp_path / "my-vault").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert weights[:16] not in content
            assert words[1000:1016] not in content
