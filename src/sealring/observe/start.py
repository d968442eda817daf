"""The flight recorder of each new group, with everything that reads it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sealring.core.hooks import GroupMade, Made
from sealring.errors import ConfigurationError
from sealring.observe import process
from sealring.observe.metrics import publish_metrics

SIGNALS: Final = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}


def observe_groups(environ: Mapping[str, str]) -> Made:
    """Keeps each group's record, and writes it where SEALRING_TRACE_DIR says.

    It is written when a call fails, and when the signal of SEALRING_TRACE_SIGNAL comes.
    """
    directory, number = _settings(environ)

    def made(group: GroupMade) -> None:
        flight = group.flight
        process.keep(flight)
        if directory is not None:
            why = f"a call of group {flight.group} failed"
            flight.on_failure = lambda: process.dump_without_failing(directory, why)
            if number is not None:
                process.dump_on_signal(number, directory)
        publish_metrics(process.counts_of_all_groups)

    return made


def _settings(environ: Mapping[str, str]) -> tuple[Path | None, signal.Signals | None]:
    directory = environ.get("SEALRING_TRACE_DIR")
    name = environ.get("SEALRING_TRACE_SIGNAL")
    if name and name not in SIGNALS:
        raise ConfigurationError(
            f"SEALRING_TRACE_SIGNAL is {name!r}; set it to {' or '.join(SIGNALS)}, or unset it"
        )
    if name and not directory:
        raise ConfigurationError(
            "SEALRING_TRACE_SIGNAL is set and SEALRING_TRACE_DIR is not: say where the flight "
            "record should go"
        )
    place = process.trace_directory(directory) if directory else None
    return place, SIGNALS[name] if name else None
