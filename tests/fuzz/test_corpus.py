"""Replays the kept corpus in every test run, with some mutations of each entry.

`make fuzz` searches further; its finds are added to the corpus.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MUTATIONS = 300
ENTRIES = [(target, path) for target in TARGETS for path in sorted((CORPUS / target).iterdir())]


def test_every_target_has_a_corpus_and_a_harness() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    harnesses = {
        path.stem.removeprefix("fuzz_") for path in Path(__file__).parent.glob("fuzz_*.py")
    }
    assert harnesses == set(TARGETS)


@pytest.mark.parametrize(
    ("target", "path"), ENTRIES, ids=[f"{target}-{path.name}" for target, path in ENTRIES]
)
@pytest.mark.threat("W13", "T2")
def test_entry_and_mutations(target: str, path: Path) -> None:
    check, entry = TARGETS[target], path.read_bytes()
    others = [other.read_bytes() for other in sorted(path.parent.iterdir())]
    check(entry)
    chance = random.Random(f"{target}/{path.name}")
    for _ in range(MUTATIONS):
        check(mutated(entry, others, chance))


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Makes one to four changes: a bit, a byte, a cut, a repetition, or another entry's end."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(data))
        to = chance.randint(at, min(len(data), at + 16))
        match chance.randrange(5):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at] + chance.randbytes(to - at or 1) + data[to:]
            case 2:
                data = data[:at] + data[to:]
            case 3:
                data = data[:to] + data[at:to] * chance.randint(1, 3) + data[to:]
            case _:
                data = data[:at] + chance.choice(others)[at:]
    return data
