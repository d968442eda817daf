"""Random faults against real traffic, and a checker of what every rank reports.

A seed gives a plan of traffic and faults; a world runs it (local, light or processes) and records a
history; the checker judges it; a report shows violations. `make chaos` runs this, and docs/chaos.md
says what is checked.
"""
