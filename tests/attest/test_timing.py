"""The cost of judging evidence is measured on evidence that verifies."""

from __future__ import annotations

from tests.attest.timing import verify_ms


def test_every_kind_is_measured() -> None:
    taken = verify_ms(runs=1)
    assert set(taken) == {"tpm", "snp", "tdx", "nvidia"}
    assert all(milliseconds > 0 for milliseconds in taken.values())
