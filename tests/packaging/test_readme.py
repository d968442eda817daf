"""The README's commands, run one after the other as a newcomer would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import readme_commands, torch_versions

ROOT = Path(__file__).parents[2]


def test_the_commands_are_read_out_of_the_readme() -> None:
    readme = (
        "text\n```sh\npip install .   # in a checkout\n\nmake test\nsealring run train.py\n```\n"
    )
    assert readme_commands.commands(readme) == [
        "pip install .",
        "make test",
        "sealring run train.py",
    ]
    assert readme_commands.runnable(readme) == ["pip install ."]
    real = readme_commands.runnable((ROOT / "README.md").read_text())
    assert real[0] == "pip install ."
    assert "sealring run -n 4 examples/ddp.py" in real


@pytest.mark.timeout(1200)
def test_the_readmes_commands_run_in_an_empty_environment() -> None:
    # A wheel of the checkout replaces `pip install .`, because it compiles only what has changed.
    # The constraint selects the locked torch, which is a CPU build.
    listed = torch_versions.pip(sys.executable, "index", "versions", "rich")
    if listed.returncode:
        pytest.skip("pip reaches no index here")
    wheel = torch_versions.built_wheel()
    done = subprocess.run(
        [sys.executable, "tools/readme_commands.py", "--wheel", str(wheel)],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final loss" in done.stdout
