"""The broker's decisions, as functions on a view of the store's rows. The rows:

rank/<job>/<rank>            the holder: its key, its attestation, how often the rank was joined
nonce/<made>/<nonce>         a nonce that was used
token/<until>/<id>/<path>    a token that was used for this path
token/<until>/<id>           how often the token was refused
out/<job>/<key>              a key that is out of the job: revoked, left, or replaced by another
barred/..., alias/...        machines and ranks that may not join (below)
guest/<SHA-256 of session>   a guest that attested and has no rank: its key, its machine's names,
                             and how many things it was given
vault/<job>/<vault>          the newest header: the number of the vault's key, its generation
vault/<job>/<vault>/<object> the newest version of an object, and its manifest's digest
forgotten/<nonce or token>   used nonces or tokens up to this time are forgotten, so all nonces or
                             tokens from before it are refused

A rank's holder is one key. The holder renews with the same key. If another key comes for the rank,
that is a re-join, which the policy counts, and the key before it is out from then on. A refusal
that must be remembered is returned and not raised, because a raise would undo the commit: such a
refusal also uses up its nonce and is in the log.

A guest is a stock KBS client. Its session begins when its evidence passes the policy, and ends
TOKEN_SECONDS later. A client without such evidence has no row. A guest has a row for each time that
it attests, and is given and refused only a limited number of things in it, because each is an entry
of the audit log, which only grows.

A vault's records only grow, so that a rollback is noticed. An older header or version leaves the
record as it is; other content under a recorded version is refused. Each job has its own records, so
a worker of another job cannot change them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.broker import audit
from sealring.attest.broker.messages import PAGE, ReadVault, RecordVault
from sealring.attest.broker.store import Row, StoreView
from sealring.attest.broker.tokens import KEPT_SECONDS, TOKEN_SECONDS, TokenGrant
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    BrokerError,
    BrokerRefusal,
    ConfigurationError,
    named,
)
from sealring.formats.log.notes import Signer

GIFTS: Final = 64
"""The most that one guest's session is given. After that, as after any status 401, the client
attests again."""
MOST_OBJECTS: Final = 100_000
"""The most objects of one vault, so that an admitted worker cannot fill the store."""


def learn_names(view: StoreView, machines: Sequence[str]) -> None:
    """Notes that all of these names are one machine's, as it has shown."""
    names = names_of(view, machines)
    if len(names) < 2:
        return
    known = {"names": names}
    for name in names:
        if view.get(_alias(name)) != known:
            view.put(_alias(name), known)
    # If one of the names was barred before the others were known, bar them all.
    bars = [bar for name in names if (bar := view.get(_machine(name))) is not None]
    if bars and len(bars) < len(names):
        bar_machines(view, names, bars[0]["time"])


def names_of(view: StoreView, machines: Iterable[str]) -> list[str]:
    """All names by which these machines are known."""
    found: set[str] = set()
    waiting = list(machines)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += (view.get(_alias(name)) or {"names": []})["names"]
    return sorted(found)


def bar_machines(view: StoreView, names: Iterable[str], now: float) -> None:
    for name in names:
        view.put(_machine(name), {"time": now})


def readmit_machine(view: StoreView, machine: str) -> list[str]:
    barred = [name for name in names_of(view, [machine]) if view.get(_machine(name)) is not None]
    if not barred:
        all_barred = [key.rpartition("/")[2] for key, _ in view.scan(_machine(""))]
        raise ConfigurationError(f"machine {machine} is not barred{_similar(machine, all_barred)}")
    for name in barred:
        view.delete(_machine(name))
    return barred


def require_seen(view: StoreView, machine: str) -> None:
    """Refuses a name that no worker has shown: it is most likely mistyped."""
    seen = {name for _, row in view.scan("rank/") for name in row["machines"]}
    seen |= {name for _, row in view.scan("guest/") for name in row["machines"]}
    seen |= {key.partition("/")[2] for key, _ in view.scan(_alias(""))}
    seen |= {key.rpartition("/")[2] for key, _ in view.scan(_machine(""))}
    if machine not in seen:
        raise ConfigurationError(
            f"no worker has joined from machine {machine}{_similar(machine, seen)}. Nothing was "
            "changed; --unseen bars it all the same"
        )


def bar_rank(view: StoreView, name: WorkerName, now: float) -> None:
    view.put(_rank(name), {"time": now})


def release_rank(view: StoreView, name: WorkerName) -> None:
    view.delete(_rank(name))


def why_machine_barred(view: StoreView, machines: Sequence[str]) -> BrokerRefusal | None:
    for machine in names_of(view, machines):
        if view.get(_machine(machine)) is not None:
            return BrokerRefusal(
                f"machine {machine[:16]} was revoked: `sealring broker release --machine` readmits",
                code="broker.worker_revoked",
            )
    return None


def why_barred(view: StoreView, name: WorkerName, machines: Sequence[str]) -> BrokerRefusal | None:
    if (refusal := why_machine_barred(view, machines)) is not None:
        return refusal
    if view.get(_rank(name)) is not None:
        return BrokerRefusal(
            f"rank {name.rank} of {name.job} was revoked: `sealring broker release` readmits",
            code="broker.worker_revoked",
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


SWEEP_ROWS: Final = 24
"""Rows that one sweep deletes: few enough to be committed together with other decisions (etcd takes
128 rows in one transaction)."""
REFUSALS_LOGGED: Final = 8
"""Refusals of one token that are logged. Even an admitted worker must not fill the log."""
_LEFT: Final = "it left"
_NONCES, _TOKENS = "nonce", "token"

Objection = Callable[[Row], BrokerError | None]


@dataclass(frozen=True, slots=True)
class Applicant:
    """A worker whose evidence passed the policy."""

    name: WorkerName
    world: int
    key: str
    machines: tuple[str, ...]
    """The names that its machine has proved. Empty where the hardware names no machine."""
    label: str
    """For example `snp Milan`, or SIMULATED."""
    facts: dict[str, Any]
    """The facts of its attestation that are kept and shown."""


@dataclass(frozen=True, slots=True)
class JobLedger:
    audit_key: Signer
    rejoins: int

    def admit(
        self, view: StoreView, nonce: str, made: int, now: float, applicant: Applicant
    ) -> BrokerError | None:
        """Gives the applicant its rank, or returns why not."""
        use_nonce(view, nonce, made)
        learn_names(view, applicant.machines)
        name = applicant.name
        who = {**_who(name), "key": applicant.key, "kind": applicant.label}
        refusal: BrokerError | None = _barred(view, name, applicant.key, applicant.machines)
        place = _place(name)
        holder = view.get(place)
        event = "joined"
        if refusal is None and holder is not None:
            if holder["key"] == applicant.key:
                event = "renewed"
            elif holder["joins"] > self.rejoins:
                refusal = BrokerRefusal(
                    f"rank {name.rank} of {name.job} is another worker's, and the policy lets it "
                    f"be joined again {self.rejoins} times. If that worker is gone, free its rank "
                    f"with `sealring broker release --job {name.job} --rank {name.rank}` (without "
                    "--rank: all ranks of the job), or raise `rejoins`",
                    code="broker.rank_taken",
                )
            else:
                event = "joined again"
                _out(view, name, holder["key"], now, "another worker joined its rank")
        if refusal is not None:
            self.note_refusal(view, now, refusal, who)
            return refusal
        before = holder or {"joins": 0, "joined": now, "certificate_until": None}
        renewed = event == "renewed"
        view.put(
            place,
            {
                "key": applicant.key,
                "machines": list(applicant.machines),
                "kind": applicant.label,
                "world": applicant.world,
                "joins": before["joins"] + (not renewed),
                "joined": before["joined"] if renewed else now,
                "attested": now,
                "certificate_until": before["certificate_until"] if renewed else None,
                "facts": applicant.facts,
            },
        )
        self.note(view, now, event, **who, machine=" ".join(applicant.machines))
        return None

    def spend(
        self,
        view: StoreView,
        grant: TokenGrant,
        path: str,
        now: float,
        *,
        objection: Objection = lambda holder: None,
        minutes: float | None = None,
    ) -> Row | BrokerError:
        """Uses a token for one thing. Returns the holder's row, or a refusal, which is logged.

        With `minutes` the thing is a certificate, which ends no later than the hardware's chain.
        """
        name = grant.name
        spent = f"{_token(grant)}/{path}"
        holder = view.get(_place(name))
        refusal: BrokerError | None = None
        if grant.until <= _forgotten(view, _TOKENS):
            refusal = BrokerRefusal(
                "what tokens of that time have fetched is forgotten: attest again. If this "
                "repeats, a broker's clock is wrong",
                code="broker.expired_token",
            )
        elif view.get(spent) is not None:
            refusal = BrokerRefusal(
                f"the token has fetched {path} before: attest again", code="broker.reused_token"
            )
        elif holder is None or holder["key"] != grant.key:
            refusal = BrokerRefusal(
                f"rank {name.rank} of {name.job} is another worker's by now",
                code="broker.rank_taken",
            )
        elif holder["facts"]["claims_digest"] != grant.claims:
            refusal = BrokerRefusal(
                "the worker has attested again since: use its newest token",
                code="broker.reused_token",
            )
        else:
            refusal = _barred(view, name, grant.key, holder["machines"]) or objection(holder)
        if refusal is not None:
            self._refuse(view, grant, path, now, refusal)
            return refusal
        assert holder is not None
        view.put(spent, {})
        if minutes is not None:
            until = min(now + 60 * minutes, holder["facts"]["chain_until"])
            holder = {**holder, "certificate_until": until}
            view.put(_place(name), holder)
        self.note(view, now, "gave", **_who(name), key=grant.key, kind=holder["kind"], what=path)
        return holder

    def revoke(self, view: StoreView, now: float, name: WorkerName) -> list[str]:
        """Takes a rank's holder out, and bars its machine where the hardware names it."""
        holder = view.get(_place(name))
        if holder is None:
            raise ConfigurationError(f"no worker holds rank {name.rank} of {name.job}")
        _out(view, name, holder["key"], now, "revoked")
        machines = names_of(view, holder["machines"])
        if machines:
            bar_machines(view, machines, now)
            barred = [f"machine {machine}" for machine in machines]
        else:
            bar_rank(view, name, now)
            barred = [f"rank {name.rank} of {name.job}, until it is released"]
        self.note(view, now, "revoked", **_who(name), key=holder["key"], barred=", ".join(barred))
        return [f"key {holder['key'][:16]}", *barred]

    def bar_machine(
        self, view: StoreView, now: float, machine: str, *, unseen: bool = False
    ) -> list[str]:
        """Bars a machine by any of its names, and takes out every worker that joined from it."""
        if not unseen:
            require_seen(view, machine)
        machines = names_of(view, [machine])
        bar_machines(view, machines, now)
        barred = [f"machine {one}" for one in machines]
        for place, holder in list(view.scan("rank/")):
            if set(holder["machines"]) & set(machines):
                name = _name_of(place)
                _out(view, name, holder["key"], now, "revoked")
                barred.append(f"rank {name.rank} of {name.job}, key {holder['key'][:16]}")
        self.note(view, now, "revoked", machine=" ".join(machines))
        return barred

    def readmit_machine(self, view: StoreView, now: float, machine: str) -> list[str]:
        machines = readmit_machine(view, machine)
        self.note(view, now, "released", machine=" ".join(machines))
        return machines

    def release(self, view: StoreView, now: float, name: WorkerName) -> None:
        """Frees a rank: its holder is out, and any worker that the policy admits may join it."""
        self._free(view, now, name, "released")
        release_rank(view, name)
        self.note(view, now, "released", **_who(name))

    def release_some(self, view: StoreView, now: float, job: str) -> list[int]:
        """Frees some of a job's ranks, few enough for one commit. Empty if all are free already."""
        names = [_name_of(place) for place, _ in view.scan(f"rank/{job}/")][:SWEEP_ROWS]
        for name in names:
            self._free(view, now, name, "released")
            self.note(view, now, "released", **_who(name))
        return [name.rank for name in names]

    def leave(self, view: StoreView, now: float, name: WorkerName, key: str) -> bool:
        """The holder itself gives its rank back. False if `key` is not the holder's."""
        holder = view.get(_place(name))
        if holder is None or holder["key"] != key:
            return False
        self._free(view, now, name, _LEFT)
        self.note(view, now, "left", **_who(name), key=key, kind=holder["kind"])
        return True

    def admit_guest(
        self, view: StoreView, nonce: str, made: int, now: float, guest: Row, evidence: str
    ) -> BrokerError | None:
        """Opens the session of `guest`, or returns why not."""
        use_nonce(view, nonce, made)
        learn_names(view, guest["machines"])
        who = {"guest": guest["session"][:16], "key": guest["key"], "kind": guest["label"]}
        if (refusal := why_machine_barred(view, guest["machines"])) is not None:
            self.note_refusal(view, now, refusal, who)
            return refusal
        row = {name: value for name, value in guest.items() if name != "session"}
        until = int(now) + TOKEN_SECONDS
        view.put(_session(guest["session"]), {**row, "until": until, "given": 0, "refusals": 0})
        machine = " ".join(guest["machines"])
        self.note(view, now, "attested", **who, machine=machine, evidence=evidence)
        return None

    def give_guest(
        self, view: StoreView, session: str, path: str, now: float, objection: BrokerError | None
    ) -> BrokerError | None:
        """Notes that an open session was given `path`, or returns why it is refused."""
        row = find_session(view, session, now)
        who = {"guest": session[:16], "key": row["key"], "kind": row["label"], "what": path}
        refusal = why_machine_barred(view, row["machines"]) or objection
        if refusal is None:
            view.put(_session(session), {**row, "given": row["given"] + 1})
            self.note(view, now, "gave", **who)
            return None
        if row["refusals"] < REFUSALS_LOGGED:
            view.put(_session(session), {**row, "refusals": row["refusals"] + 1})
            self.note_refusal(view, now, refusal, who)
        return refusal

    def record_vault(self, view: StoreView, now: float, asked: RecordVault) -> Row:
        """Records a header or version that is newer than the known one. Returns the newest ones."""
        require_holder(view, asked.name, asked.key, now)
        place = _vault(asked.name.job, asked.vault)
        known = view.get(place) or {"key": 0, "generation": 0, "objects": 0}
        header = max((asked.number, asked.generation), (known["key"], known["generation"]))
        facts: Row = {}
        entries: list[Row] = []
        objects = known["objects"]
        if asked.entry is not None:
            entry = view.get(f"{place}/{asked.entry.object}")
            if entry is None and objects >= MOST_OBJECTS:
                raise BrokerRefusal(
                    f"the broker keeps records of {MOST_OBJECTS} objects of a vault",
                    code="broker.too_many_records",
                )
            if entry is None or asked.entry.version > entry["version"]:
                objects += entry is None
                entry = {"version": asked.entry.version, "manifest": asked.entry.manifest}
                view.put(f"{place}/{asked.entry.object}", entry)
                facts = {"object": asked.entry.object, **entry}
            elif (
                asked.entry.version == entry["version"]
                and asked.entry.manifest != entry["manifest"]
            ):
                raise BrokerRefusal(
                    f"version {entry['version']} of object {asked.entry.object} was recorded with "
                    "another content: two copies of the vault have gone different ways",
                    code="broker.recorded_otherwise",
                )
            entries = [{"object": asked.entry.object, **entry}]
        if facts or header != (known["key"], known["generation"]):
            view.put(place, {"key": header[0], "generation": header[1], "objects": objects})
            self.note(
                view, now, "recorded", job=asked.name.job, rank=asked.name.rank, key=asked.key,
                what=f"vault/{asked.vault}", vault_key=header[0], generation=header[1], **facts,
            )  # fmt: skip
        return {"key": header[0], "generation": header[1], "entries": entries}

    def _free(self, view: StoreView, now: float, name: WorkerName, why: str) -> None:
        holder = view.get(_place(name))
        if holder is not None:
            _out(view, name, holder["key"], now, why)
            view.delete(_place(name))

    def _refuse(
        self, view: StoreView, grant: TokenGrant, path: str, now: float, refusal: BrokerError
    ) -> None:
        refusals = (view.get(_token(grant)) or {"refusals": 0})["refusals"]
        if refusals < REFUSALS_LOGGED:
            view.put(_token(grant), {"refusals": refusals + 1})
            who = {**_who(grant.name), "key": grant.key, "what": path[:200]}
            self.note_refusal(view, now, refusal, who)

    def note_refusal(self, view: StoreView, now: float, refusal: BrokerError, who: Row) -> None:
        self.note(view, now, "refused", **who, error=named(refusal), why=str(refusal))

    def note(self, view: StoreView, now: float, event: str, **facts: Any) -> None:
        audit.append(view, self.audit_key, now, event, facts)


def find_session(view: StoreView, session: str, now: float) -> Row:
    """The row of an open session. `session` is the session's hash."""
    row = view.get(_session(session))
    if row is None:
        raise BrokerRefusal(
            "this session has attested nothing: attest first", code="broker.unknown_token"
        )
    if now >= row["until"]:
        raise BrokerRefusal("the session has ended: attest again", code="broker.expired_token")
    if row["given"] >= GIFTS:
        raise BrokerRefusal(
            f"the session was given {GIFTS} things: attest again", code="broker.expired_token"
        )
    return row


def read_vault(view: StoreView, now: float, asked: ReadVault) -> Row:
    """The vault's header, and a page of its objects in the order of their ids."""
    require_holder(view, asked.name, asked.key, now)
    place = _vault(asked.name.job, asked.vault)
    header = view.get(place) or {"key": 0, "generation": 0}
    found = []
    for key, row in view.scan(f"{place}/", asked.after):
        name = key.rpartition("/")[2]
        if name > asked.after:
            found.append({"object": name, "version": row["version"], "manifest": row["manifest"]})
        if len(found) == PAGE:
            break
    return {"key": header["key"], "generation": header["generation"], "entries": found}


def holders(view: StoreView) -> list[tuple[WorkerName, Row]]:
    return [(_name_of(place), row) for place, row in view.scan("rank/")]


def require_holder(view: StoreView, name: WorkerName, key: str, now: float) -> None:
    """Raises unless this key holds the rank now, with a certificate that has not ended."""
    holder = view.get(_place(name))
    if holder is None or holder["key"] != key:
        raise BrokerRefusal(
            f"this worker's key does not hold rank {name.rank} of {name.job}",
            code="broker.rank_taken",
        )
    if (refusal := _barred(view, name, key, holder["machines"])) is not None:
        raise refusal
    if holder["certificate_until"] is None or holder["certificate_until"] < now:
        raise BrokerRefusal(
            f"rank {name.rank} of {name.job} has no certificate: attest again",
            code="broker.expired_token",
        )


def keys_out(view: StoreView, job: str) -> list[str]:
    """The keys that peers must not talk to. A worker that left by itself is not among them."""
    prefix = f"out/{job}/"
    return [key.removeprefix(prefix) for key, row in view.scan(prefix) if row["why"] != _LEFT]


def keys_to_leave(view: StoreView, job: str, now: float) -> list[str]:
    """The keys of `keys_out`, and those whose certificate has ended: an honest worker has left all
    groups by then."""
    ended = [
        row["key"]
        for _, row in view.scan(f"rank/{job}/")
        if row["certificate_until"] is not None and row["certificate_until"] < now
    ]
    return sorted({*keys_out(view, job), *ended})


def sweep(view: StoreView, now: float) -> int:
    """Deletes some of the rows that can no longer be used. Returns how many."""
    forgotten = 0
    for kind, kept in ((_NONCES, KEPT_SECONDS), (_TOKENS, 0)):
        until = before = _forgotten(view, kind)
        for key, _ in view.scan(f"{kind}/"):
            at = int(key.split("/")[1])
            if forgotten == SWEEP_ROWS or at + kept > now:
                break
            view.delete(key)
            until = max(until, at)
            forgotten += 1
        # Another broker's clock may be behind: it must not take a forgotten nonce for a new one.
        if until != before:
            view.put(f"forgotten/{kind}", {"until": until})
    ended = [key for key, row in view.scan("guest/") if row["until"] <= now]
    for key in ended[: SWEEP_ROWS - forgotten]:
        view.delete(key)
        forgotten += 1
    return forgotten


def _barred(
    view: StoreView, name: WorkerName, key: str, machines: Sequence[str]
) -> BrokerError | None:
    if (row := view.get(_out_key(name, key))) is not None:
        return BrokerRefusal(
            f"this worker's key is no longer of job {name.job}: {row['why']}",
            code="broker.worker_revoked",
        )
    return why_barred(view, name, machines)


def _forgotten(view: StoreView, kind: str) -> int:
    return int((view.get(f"forgotten/{kind}") or {"until": -1})["until"])


def use_nonce(view: StoreView, nonce: str, made: int) -> None:
    if made <= _forgotten(view, _NONCES):
        raise BrokerRefusal(
            "which nonces of that time were used is forgotten: ask for another one. If this "
            "repeats, a broker's clock is wrong",
            code="broker.expired_nonce",
        )
    # The name holds when it was made, so it stays used even if the policy's nonce_seconds change.
    used = f"nonce/{made:012d}/{nonce}"
    if view.get(used) is not None:
        raise BrokerRefusal(
            "evidence was brought for this nonce before: ask for another one",
            code="broker.reused_nonce",
        )
    view.put(used, {})


def _out(view: StoreView, name: WorkerName, key: str, now: float, why: str) -> None:
    view.put(_out_key(name, key), {"rank": name.rank, "why": why, "time": now})


def _who(name: WorkerName) -> Row:
    return {"job": name.job, "rank": name.rank}


def _token(grant: TokenGrant) -> str:
    return f"token/{grant.until:012d}/{grant.identifier}"


def _place(name: WorkerName) -> str:
    return f"rank/{name.job}/{name.rank:05d}"


def _name_of(place: str) -> WorkerName:
    _, job, rank = place.split("/")
    return WorkerName(job, int(rank))


def _out_key(name: WorkerName, key: str) -> str:
    return f"out/{name.job}/{key}"


def _session(session: str) -> str:
    return f"guest/{session}"


def _vault(job: str, vault: str) -> str:
    return f"vault/{job}/{vault}"
