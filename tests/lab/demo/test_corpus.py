"""The text that the demo trains on, and its order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sealring.errors import ConfigurationError
from sealring.lab.demo.train import Batches, standard_library


def library(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_standard_library_is_there_and_always_the_same() -> None:
    text = standard_library(1 << 20)
    assert len(text) == 1 << 20
    assert text == standard_library(1 << 20)
    assert b"def " in text


def test_modules_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    root = library(
        tmp_path, {"z.py": "z", "b/y.py": "y", "a/x.py": "x", "a/c/w.py": "w", "c": "no"}
    )
    assert standard_library(100, root) == b"zxwy"


def test_what_is_not_the_library_is_left_out(tmp_path: Path) -> None:
    root = library(tmp_path, {"a.py": "a", "site-packages/b.py": "b", "json/tests/c.py": "c"})
    assert standard_library(100, root) == b"a"


def test_it_ends_at_the_limit(tmp_path: Path) -> None:
    assert standard_library(3, library(tmp_path, {"a.py": "ab", "b.py": "cd"})) == b"abc"


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there are none in"):
        standard_library(100, tmp_path)


def test_a_target_is_the_byte_after_its_input() -> None:
    inputs, targets = Batches(bytes(range(200)), context=8, size=5, seed=0).draw()
    assert inputs.shape == targets.shape == (5, 8)
    assert torch.equal(inputs + 1, targets)


def test_one_seed_draws_one_sequence_of_batches() -> None:
    text = bytes(range(200))
    first, second, other = (Batches(text, context=8, size=5, seed=s) for s in (1, 1, 2))
    for _ in range(3):
        batch = first.draw()[0]
        assert torch.equal(batch, second.draw()[0])
        assert not torch.equal(batch, other.draw()[0])


def test_the_last_byte_can_be_a_target() -> None:
    _, targets = Batches(b"abc", context=2, size=4, seed=0).draw()
    assert targets[:, -1].tolist() == [ord("c")] * 4
