"""Modules of frameworks are changed when they load, or at once if they are loaded already.

The packages here have only the frameworks' names; `make integrations` runs the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "deepspeed/comm/torch.py": "def build_shm_op(): return 'operator'\n",
    "deepspeed/ops/op_builder/cpu/comm.py": (
        "class ShareMemCommBuilder:\n"
        "    NAME = 'deepspeed_shm_comm'\n"
        "    def load(self): return 'operator'\n"
    ),
    "torchft/process_group.py": "class ProcessGroupGloo: pass\n",
    "torchft/checkpointing/http_transport.py": "class HTTPTransport: pass\n",
}
IMPORT = "from deepspeed.comm import torch as t; from deepspeed.ops.op_builder.cpu import comm\n"
GUARD = "import torch.distributed, sealring; sealring.require_sealed()\n"
USE = "print(t.build_shm_op()); comm.ShareMemCommBuilder().load()\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        for package in file.relative_to(folder).parents[:-1]:
            # Otherwise Python would import an installed framework.
            (folder / package / "__init__.py").touch()
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, folder / "script.py"],
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("code", [GUARD + IMPORT + USE, IMPORT + GUARD + USE])
@pytest.mark.threat("G3")
def test_deepspeeds_operator_is_away_and_refused(code: str, tmp_path: Path) -> None:
    done = run(tmp_path, code)
    assert done.stdout == "None\n"
    last = done.stderr.splitlines()[-1]
    assert "PlaintextGroup: " in last
    assert f"{tmp_path / 'script.py'}:3" in last
    assert "deepspeed_shm_comm" in last


def test_without_the_mode_it_is_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, IMPORT + USE)
    assert (done.returncode, done.stdout) == (0, "operator\n")


@pytest.mark.parametrize(
    ("module", "name"),
    [("process_group", "ProcessGroupGloo"), ("checkpointing.http_transport", "HTTPTransport")],
)
@pytest.mark.threat("G4")
def test_torchfts_plaintext_classes_are_refused(module: str, name: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"{GUARD}from torchft.{module} import {name}\n{name}()\n")
    last = done.stderr.splitlines()[-1]
    assert f"PlaintextGroup: {tmp_path / 'script.py'}:3 uses torchft's {name}" in last
    assert "sealring.train.integrations.torchft.sealed_manager" in last
