"""Who holds which rank, what was used, who is out: the broker's decisions as functions on a view.

rank/<job>/<rank>            the holder: its key, its attestation, how often the rank was joined
nonce/<until>/<nonce>        used
token/<until>/<id>/<path>    used for this
out/<job>/<key>              a key that is no longer of the job: revoked, or another one came
barred/<what>                a machine or a rank that may not join

A rank has one holder, which is a key. The same key comes again to renew. Another key is a re-join,
which the policy counts; the key before it is out from then on. Outcomes are returned and not raised
where something is to be remembered of them: a refusal uses up its nonce too, and is in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.broker import audit
from sealring.broker.store import Row, View
from sealring.broker.tokens import Grant
from sealring.errors import (
    ConfigurationError,
    RankTaken,
    ReusedNonce,
    ReusedToken,
    SealringError,
    WorkerRevoked,
)
from sealring.identity.names import WorkerName

SWEEP_ROWS: Final = 24
"""Few enough to be committed together with other decisions (etcd takes 128 rows at once)."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A worker whose evidence was judged."""

    name: WorkerName
    world: int
    key: str
    machine: str
    label: str
    """`snp Milan`, or SIMULATED."""
    facts: dict[str, Any]
    """What is shown and kept of its attestation."""


@dataclass(frozen=True, slots=True)
class Ledger:
    audit_key: Ed25519PrivateKey
    rejoins: int

    def refuse(
        self, view: View, nonce: str, until: int, now: float, who: Row, error: SealringError
    ) -> None:
        """Evidence that did not pass. Its nonce is used all the same."""
        _use_nonce(view, nonce, until)
        self._note(view, now, "refused", **who, error=type(error).__name__, why=str(error)[:500])

    def admit(
        self, view: View, nonce: str, until: int, now: float, applicant: Applicant
    ) -> SealringError | None:
        """Give the applicant its rank, or say why not."""
        _use_nonce(view, nonce, until)
        name = applicant.name
        who = {**_who(name), "key": applicant.key, "kind": applicant.label}
        refusal: SealringError | None = self._barred(view, name, applicant.key, applicant.machine)
        place = _place(name)
        holder = view.get(place)
        event = "joined"
        if refusal is None and holder is not None:
            if holder["key"] == applicant.key:
                event = "renewed"
            elif holder["joins"] > self.rejoins:
                refusal = RankTaken(
                    f"rank {name.rank} of {name.job} is another worker's, and the policy lets it "
                    f"be joined again {self.rejoins} times: raise `rejoins`, or free the rank with "
                    f"`sealring broker release --job {name.job} --rank {name.rank}`"
                )
            else:
                event = "joined again"
                _out(view, name, holder["key"], now, "another worker joined its rank")
        if refusal is not None:
            error = type(refusal).__name__
            self._note(view, now, "refused", **who, error=error, why=str(refusal))
            return refusal
        before = holder or {"joins": 0, "joined": now, "certificate_until": None}
        renewed = event == "renewed"
        view.put(
            place,
            {
                "key": applicant.key,
                "machine": applicant.machine,
                "kind": applicant.label,
                "world": applicant.world,
                "joins": before["joins"] + (not renewed),
                "joined": before["joined"] if renewed else now,
                "attested": now,
                "certificate_until": before["certificate_until"] if renewed else None,
                "facts": applicant.facts,
            },
        )
        self._note(view, now, event, **who, machine=applicant.machine)
        return None

    def spend(
        self, view: View, grant: Grant, path: str, now: float, minutes: float | None = None
    ) -> Row:
        """Use a token for one thing; the holder's row, if it still is the holder.

        With `minutes` the thing is a certificate, which ends no later than the hardware's chain.
        """
        name = grant.name
        spent = f"token/{grant.until:012d}/{grant.identifier}/{path}"
        if view.get(spent) is not None:
            raise ReusedToken(f"the token has fetched {path} before: attest again")
        holder = view.get(_place(name))
        if holder is None or holder["key"] != grant.key:
            raise RankTaken(f"rank {name.rank} of {name.job} is another worker's by now")
        if (refusal := self._barred(view, name, grant.key, holder["machine"])) is not None:
            raise refusal
        view.put(spent, {})
        if minutes is not None:
            until = min(now + 60 * minutes, holder["facts"]["chain_until"])
            holder = {**holder, "certificate_until": until}
            view.put(_place(name), holder)
        self._note(view, now, "gave", **_who(name), key=grant.key, kind=holder["kind"], what=path)
        return holder

    def revoke(self, view: View, now: float, name: WorkerName) -> list[str]:
        """Take a rank's holder out, with its machine where the hardware names it."""
        holder = view.get(_place(name))
        if holder is None:
            raise ConfigurationError(f"nobody holds rank {name.rank} of {name.job}")
        _out(view, name, holder["key"], now, "revoked")
        bar = _machine_bar(holder["machine"]) if holder["machine"] else _rank_bar(name)
        view.put(bar, {"time": now})
        barred = [f"key {holder['key'][:16]}", bar.removeprefix("barred/").replace("/", " ")]
        self._note(view, now, "revoked", **_who(name), key=holder["key"], barred=bar)
        return barred

    def bar_machine(self, view: View, now: float, machine: str) -> list[str]:
        """Take out a machine, and every worker that joined from it."""
        view.put(_machine_bar(machine), {"time": now})
        barred = [f"machine {machine}"]
        for place, holder in list(view.scan("rank/")):
            if holder["machine"] == machine:
                name = _name_of(place)
                _out(view, name, holder["key"], now, "revoked")
                barred.append(f"rank {name.rank} of {name.job}, key {holder['key'][:16]}")
        self._note(view, now, "revoked", machine=machine)
        return barred

    def release(self, view: View, now: float, name: WorkerName) -> None:
        """Free a rank: its holder is out, and whoever the policy admits may join it."""
        holder = view.get(_place(name))
        if holder is not None:
            _out(view, name, holder["key"], now, "released")
            view.delete(_place(name))
        view.delete(_rank_bar(name))
        self._note(view, now, "released", **_who(name))

    def readmit_machine(self, view: View, now: float, machine: str) -> None:
        view.delete(_machine_bar(machine))
        self._note(view, now, "released", machine=machine)

    def _barred(self, view: View, name: WorkerName, key: str, machine: str) -> WorkerRevoked | None:
        if view.get(_out_key(name, key)) is not None:
            return WorkerRevoked(f"this worker's key is no longer of job {name.job}")
        if machine and view.get(_machine_bar(machine)) is not None:
            return WorkerRevoked(
                f"machine {machine[:16]} was revoked: `sealring broker release --machine` readmits"
            )
        if view.get(_rank_bar(name)) is not None:
            return WorkerRevoked(
                f"rank {name.rank} of {name.job} was revoked: `sealring broker release` readmits"
            )
        return None

    def _note(self, view: View, now: float, event: str, **facts: Any) -> None:
        audit.append(view, self.audit_key, now, event, facts)


def holders(view: View) -> list[tuple[WorkerName, Row]]:
    return [(_name_of(place), row) for place, row in view.scan("rank/")]


def keys_out(view: View, job: str) -> list[str]:
    """The keys that are no longer of the job."""
    prefix = f"out/{job}/"
    return [key.removeprefix(prefix) for key, _ in view.scan(prefix)]


def sweep(view: View, now: float) -> int:
    """Forget some of what nobody can use any more."""
    forgotten = 0
    for prefix in ("nonce/", "token/"):
        for key, _ in view.scan(prefix):
            if forgotten == SWEEP_ROWS or int(key.split("/")[1]) > now:
                break
            view.delete(key)
            forgotten += 1
    return forgotten


def _use_nonce(view: View, nonce: str, until: int) -> None:
    used = f"nonce/{until:012d}/{nonce}"
    if view.get(used) is not None:
        raise ReusedNonce("evidence was brought for this nonce before: ask for another one")
    view.put(used, {})


def _out(view: View, name: WorkerName, key: str, now: float, why: str) -> None:
    view.put(_out_key(name, key), {"rank": name.rank, "why": why, "time": now})


def _who(name: WorkerName) -> Row:
    return {"job": name.job, "rank": name.rank}


def _place(name: WorkerName) -> str:
    return f"rank/{name.job}/{name.rank:05d}"


def _name_of(place: str) -> WorkerName:
    _, job, rank = place.split("/")
    return WorkerName(job, int(rank))


def _out_key(name: WorkerName, key: str) -> str:
    return f"out/{name.job}/{key}"


def _machine_bar(machine: str) -> str:
    return f"barred/machine/{machine}"


def _rank_bar(name: WorkerName) -> str:
    return f"barred/rank/{name.job}/{name.rank:05d}"
