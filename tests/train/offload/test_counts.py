"""The counts under which parked tensors are sealed; tests/gpu has the GPU's part."""

from __future__ import annotations

import sys
import threading

import pytest

from sealring.train.offload.parking import Counts


@pytest.mark.threat("V4")
def test_no_two_threads_get_one_count() -> None:
    """A repeated count would be a repeated nonce."""
    counts, taken = Counts(), []

    def take() -> None:
        for records in range(1, 2000):
            number, first = counts.take(records % 3 + 1)
            taken.append((number, range(first, first + records % 3 + 1)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(number for number, _ in taken) == list(range(1, len(taken) + 1))
    nonces = sorted(count for _, records in taken for count in records)
    assert nonces == list(range(len(nonces)))
