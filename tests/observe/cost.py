"""Print what recording one collective costs: `python -m tests.observe.cost`."""

from __future__ import annotations

import time
import timeit

from tests.observe.test_flight import CountingEngine, recorder, run

CALLS = 100_000


def main() -> None:
    flight = recorder(CountingEngine())
    times = timeit.repeat(lambda: run(flight, 1), number=CALLS, repeat=5, timer=time.process_time)
    print(f"{min(times) / CALLS * 1e6:.1f} µs of processor time per collective")


if __name__ == "__main__":
    main()
