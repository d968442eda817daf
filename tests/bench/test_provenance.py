"""`sealring bench provenance`: real statements of a real run, counted."""

from __future__ import annotations

from sealring.bench.provenance import BAR, measure_provenance


def test_statements_are_written_and_both_variants_are_timed() -> None:
    found = measure_provenance("mlp", ranks=2, batch=2, every=2, blocks=2)
    # A warm-up, two timed blocks, and the final one, of each rank.
    assert found.statements == 2 * 4
    assert 1000 < found.bytes_per_statement < 20_000
    assert found.disk_bytes > found.statements * found.bytes_per_statement
    assert min(found.recorded_ms, found.unrecorded_ms) > 0
    assert found.as_json()["bar"] == BAR
