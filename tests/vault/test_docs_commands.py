"""The commands of docs/vault.md, tried as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "vault.md"


def commands() -> list[str]:
    block = PAGE.read_text().split("<!-- commands -->")[1].split("<!-- end of commands -->")[0]
    return block.split("```sh\n")[1].split("```")[0].splitlines()


def test_the_nine_commands_work(tmp_path: Path) -> None:
    assert len(commands()) == 9
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands())],
        cwd=tmp_path,
        env={**clean, "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 versions are intact" in done.stdout
    original = (tmp_path / "data" / "numbers.txt").read_bytes()
    assert (tmp_path / "data.opened" / "numbers.txt").read_bytes() == original
    assert "Keys that were handed out stay known" in done.stdout
