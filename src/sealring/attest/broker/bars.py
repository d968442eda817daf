"""Which machines and ranks may not join, and by which names a machine is known.

barred/machine/<name>        a machine that may not join, by one of its names
barred/rank/<job>/<rank>     a rank that no worker may join until it is released
alias/<name>                 all names of a machine that has shown more than one

A machine's name is what its hardware says of itself. A TPM has one for each of its endorsement
keys: those that it has proved to hold together are names of one machine from then on, and barred
together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from sealring.attest.broker.store import View
from sealring.core.identity.names import WorkerName
from sealring.errors import ConfigurationError, WorkerRevoked


def learn_names(view: View, machines: Sequence[str]) -> None:
    """The machine has shown that all of these are its own."""
    names = names_of(view, machines)
    if len(names) < 2:
        return
    known = {"names": names}
    for name in names:
        if view.get(_alias(name)) != known:
            view.put(_alias(name), known)
    # A bar that was put on one of them before the others were known.
    bars = [bar for name in names if (bar := view.get(_machine(name))) is not None]
    if bars and len(bars) < len(names):
        bar_machines(view, names, bars[0]["time"])


def names_of(view: View, machines: Iterable[str]) -> list[str]:
    """All names by which these machines are known."""
    found: set[str] = set()
    waiting = list(machines)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += (view.get(_alias(name)) or {"names": []})["names"]
    return sorted(found)


def bar_machines(view: View, names: Iterable[str], now: float) -> None:
    for name in names:
        view.put(_machine(name), {"time": now})


def readmit_machine(view: View, machine: str) -> list[str]:
    barred = [name for name in names_of(view, [machine]) if view.get(_machine(name)) is not None]
    if not barred:
        all_barred = [key.rpartition("/")[2] for key, _ in view.scan(_machine(""))]
        raise ConfigurationError(f"machine {machine} is not barred{_similar(machine, all_barred)}")
    for name in barred:
        view.delete(_machine(name))
    return barred


def require_seen(view: View, machine: str) -> None:
    """A name that no worker has shown is most likely a wrong one."""
    seen = {name for _, row in view.scan("rank/") for name in row["machines"]}
    seen |= {name for _, row in view.scan("guest/") for name in row["machines"]}
    seen |= {key.partition("/")[2] for key, _ in view.scan(_alias(""))}
    seen |= {key.rpartition("/")[2] for key, _ in view.scan(_machine(""))}
    if machine not in seen:
        raise ConfigurationError(
            f"no worker has joined from machine {machine}{_similar(machine, seen)}. Nothing was "
            "changed; --unseen bars it all the same"
        )


def bar_rank(view: View, name: WorkerName, now: float) -> None:
    view.put(_rank(name), {"time": now})


def release_rank(view: View, name: WorkerName) -> None:
    view.delete(_rank(name))


def why_machine_barred(view: View, machines: Sequence[str]) -> WorkerRevoked | None:
    for machine in names_of(view, machines):
        if view.get(_machine(machine)) is not None:
            return WorkerRevoked(
                f"machine {machine[:16]} was revoked: `sealring broker release --machine` readmits"
            )
    return None


def why_barred(view: View, name: WorkerName, machines: Sequence[str]) -> WorkerRevoked | None:
    if (refusal := why_machine_barred(view, machines)) is not None:
        return refusal
    if view.get(_rank(name)) is not None:
        return WorkerRevoked(
            f"rank {name.rank} of {name.job} was revoked: `sealring broker release` readmits"
        )
    return None


def _similar(machine: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(machine, list(known), n=1)
    return f"; {close[0]} is similar" if close else ""


def _machine(name: str) -> str:
    return f"barred/machine/{name}"


def _rank(name: WorkerName) -> str:
    return f"barred/rank/{name.job}/{name.rank:05d}"


def _alias(name: str) -> str:
    return f"alias/{name}"
