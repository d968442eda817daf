"""Random faults against real traffic, and a checker of what every rank then says.

plan (seed -> traffic and faults) -> a world that runs it (local, processes) -> history -> check
-> report. `make chaos` runs it; docs/chaos.md says what is checked.
"""
