"""Frameworks' scripts that name Gloo, or nothing, under `sealring run`: sealed, and bit-equal."""

from __future__ import annotations

import pytest

from tests.integrations.frameworks import FRAMEWORKS, compare, version_of


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_a_framework_is_sealed_and_computes_the_same(script: str) -> None:
    if version_of(FRAMEWORKS[script]) is None:
        pytest.skip(f"{FRAMEWORKS[script]} is not installed: make integrations installs it")
    found = compare(script)
    assert found.groups == ["SealedProcessGroup"]
    assert found.difference == 0.0
