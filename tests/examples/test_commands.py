"""The examples as a person starts them, and the page that describes them."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel-training.md").read_text()
# gpt.py is what they share; docs/vault.md has private_run.py.
OTHERS = ("gpt.py", "private_run.py")
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name not in OTHERS)


def printed_by(*command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1", "SEALRING_SECRET": secrets.token_hex(32)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ddp_as_the_readme_starts_it() -> None:
    sealring = str(Path(sys.executable).parent / "sealring")
    alone = printed_by(sys.executable, "examples/gpt.py", "--steps", "3", "--json")
    four = printed_by(sealring, "run", "-n", "4", "examples/ddp.py", "--steps", "3", "--json")
    assert json.loads(four)["losses"] == pytest.approx(json.loads(alone)["losses"], rel=1e-5)


def test_elastic_trains_on_to_the_same_loss_after_a_worker_is_killed(tmp_path: Path) -> None:
    alone = printed_by(sys.executable, "examples/gpt.py", "--steps", "6", "--json")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    result = json.loads(
        printed_by(
            *launcher, "2", "--max-restarts", "1", "examples/elastic.py", "--steps", "6", "--json",
            "--checkpoint", str(tmp_path / "gpt.pt"), "--kill-at", "4",
        )
    )  # fmt: skip
    assert result["restarts"] == 1
    assert result["resumed_at"] == 4
    assert result["losses"] == pytest.approx(json.loads(alone)["losses"], rel=1e-5)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_page_and_the_example_give_the_same_kind_of_command(example: str) -> None:
    docstring = (ROOT / "examples" / example).read_text().split('"""')[1]
    [command] = re.findall(r"^ *(sealring run .*)$", docstring, re.MULTILINE)
    assert f"\n{command}\n" in PAGE
    assert f"| `{example}` |" in PAGE


def test_code_on_the_page_is_code_of_the_examples() -> None:
    sources = [(ROOT / "examples" / example).read_text() for example in EXAMPLES]
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 4
    for block in blocks:
        if block != 'dist.init_process_group("sealring")\n':
            assert any(block in source for source in sources), block
