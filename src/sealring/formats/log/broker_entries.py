"""What a broker's log says about workers: certificates given, and keys taken out of their job.

A broker (attest/broker/ledger.py) writes the entries. Readers need none of its packages and see
only the published log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.errors import TamperedLog
from sealring.formats.strict import read_json

CERTIFICATE: Final = "sealring/certificate/worker"
"""The name of a worker's certificate among the resources that a broker gives out."""
_MAX_TEXT: Final = 1024
_JOINED: Final = frozenset({"joined", "joined again", "renewed"})


def broker_name(authority: x509.Certificate) -> str:
    """The name of the broker that holds this authority's key."""
    return authority.fingerprint(SHA256()).hex()[:16]


def log_of_broker(authority: x509.Certificate) -> str:
    """The origin of the log of the broker that holds this authority's key."""
    return f"broker.sealring/{broker_name(authority)}"


class RankHolder(NamedTuple):
    """The worker that holds a rank, until another one joins the rank."""

    key: str
    machines: frozenset[str]


class Given(NamedTuple):
    """A certificate that a broker gave out."""

    time: float
    kind: str
    """For example `snp Milan`, or SIMULATED."""


class Out(NamedTuple):
    """When and why a key was taken out of its job."""

    time: float
    why: str


@dataclass(slots=True)
class BrokerHistory:
    """A summary of a log's entries so far."""

    given: dict[tuple[str, int, str], list[Given]] = field(default_factory=dict)
    """The certificates given, by job, rank and key (SHA-256 of the public key)."""
    out: dict[tuple[str, str], Out] = field(default_factory=dict)
    """The keys taken out, by job and key, each for the first time. A worker that left by itself is
    not here."""
    _holders: dict[tuple[str, int], RankHolder] = field(default_factory=dict)

    def add(self, number: int, data: bytes) -> None:
        """Adds the next entry. TamperedLog if a broker cannot have written it."""
        try:
            entry = read_json(data)
            time, event = float(entry["time"]), entry["event"]
            if type(entry["number"]) is not int or entry["number"] != number:
                raise ValueError("it has another number")
            if not math.isfinite(time):
                raise ValueError("it has no time")
            self._add(time, event, entry)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise TamperedLog(
                f"entry {number} is not one that a broker writes: {str(problem)[:200]}"
            ) from None

    def _add(self, time: float, event: str, entry: dict[str, Any]) -> None:
        if event in _JOINED:
            place, machines = _place(entry), frozenset(entry["machine"].split())
            before = self._holders.get(place)
            if before is not None and before.key != entry["key"]:
                self._take_out(place, time, "another worker joined its rank")
            self._holders[place] = RankHolder(_text(entry["key"]), machines)
        elif event == "gave" and entry.get("what") == CERTIFICATE and "rank" in entry:
            found = self.given.setdefault((*_place(entry), _text(entry["key"])), [])
            found.append(Given(time, _text(entry["kind"])))
        elif event == "left":
            self._holders.pop(_place(entry), None)
        elif event in ("revoked", "released") and "rank" in entry:
            self._take_out(_place(entry), time, event)
        elif event == "revoked" and "machine" in entry:
            self._revoke_machines(entry["machine"].split(), time)

    def _take_out(self, place: tuple[str, int], time: float, why: str) -> None:
        holder = self._holders.pop(place, None)
        if holder is not None:
            self.out.setdefault((place[0], holder.key), Out(time, why))

    def _revoke_machines(self, machines: Iterable[str], time: float) -> None:
        barred = frozenset(machines)
        for place in [at for at, one in self._holders.items() if one.machines & barred]:
            self._take_out(place, time, "revoked")


def _place(entry: dict[str, Any]) -> tuple[str, int]:
    rank = entry["rank"]
    if type(rank) is not int:
        raise TypeError("its rank is no number")
    return _text(entry["job"]), rank


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise TypeError("something in it is no text, or too long")
    return value
