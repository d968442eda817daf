"""What is said of torch's versions: to who uses another one, in the package and the documents."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sealring.version import TESTED_TORCH, untested_torch

ROOT = Path(__file__).parents[2]
TWO_GROUPS = """
import sys, torch
torch.__version__ = sys.argv[1]
import torch.distributed as dist
dist.init_process_group("sealring", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("version", "lines"), [("2.16.0+cu140", 1), ("2.15.1", 0)])
def test_a_newer_torch_is_named_in_one_line_when_groups_are_made(version: str, lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_GROUPS, version], capture_output=True, text=True,
        env={**os.environ, "SEALRING_SECRET": secrets.token_hex(32)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "was not tested with sealring" in line]
    assert said == [f"sealring: {untested_torch(version)}"] * lines


def test_the_package_allows_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [each for each in project["dependencies"] if Requirement(each).name == "torch"]
    low, high = TESTED_TORCH
    assert bound == f"torch>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


def test_the_table_of_the_documents_has_all_that_were_tested() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    (heading,) = re.findall(r"^\|  \| (2\..*) \|$", page, re.MULTILINE)
    minors = [tuple(map(int, each.split(".")[:2])) for each in heading.split(" | ")]
    assert minors == [(2, minor) for minor in range(TESTED_TORCH[0][1], TESTED_TORCH[1][1] + 1)]
