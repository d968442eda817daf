"""Wycheproof's vectors of an AEAD with our sizes, where they lie beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "shared" / "vectors" / "wycheproof"
OURS = {"keySize": 256, "ivSize": 96, "tagSize": 128}

Seal = Callable[[bytes, bytes, bytes, bytes], bytes]
Open = Callable[[bytes, bytes, bytes, bytes], bytes | None]


def check_against(name: str, seal: Seal, open_: Open) -> int:
    """Every valid vector seals and opens as it says, no invalid one opens. How many there were."""
    file = FOLDER / name
    if not file.exists():
        pytest.skip(f"Wycheproof's vectors are not beside this checkout ({file})")
    groups = json.loads(file.read_text())["testGroups"]
    tests = [test for group in groups if OURS.items() <= group.items() for test in group["tests"]]
    for test in tests:
        key, nonce, aad, plain, cipher, tag = (
            bytes.fromhex(test[part]) for part in ("key", "iv", "aad", "msg", "ct", "tag")
        )
        opened = open_(key, nonce, aad, cipher + tag)
        if test["result"] == "valid":
            assert seal(key, nonce, aad, plain) == cipher + tag, test["tcId"]
            assert opened == plain, test["tcId"]
        else:
            assert opened is None, test["tcId"]
    assert {test["result"] for test in tests} == {"valid", "invalid"}
    return len(tests)
