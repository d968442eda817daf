"""The table of checks that are removed from the models, and of the flaws that must then be found.

docs/model.md has the same table in words; tests/model compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Model:
    name: str
    file: str
    module: str
    operator: str
    scenarios: tuple[str, ...]
    large: tuple[str, ...]
    """The scenarios that the quick run leaves out."""


SETUP: Final = Model(
    "set-up",
    "setup.maude",
    "SCENARIOS",
    "setup",
    (
        "attempts", "other-group", "other-members", "other-settings", "other-world", "other-job",
        "outsider", "compromised", "two-groups", "three", "second-worker", "stolen-authority",
        "two-runs",
    ),
    ("attempts", "compromised", "three", "second-worker"),
)  # fmt: skip
BROKER: Final = Model(
    "broker",
    "broker.maude",
    "BROKER-SCENARIOS",
    "broker",
    (
        "join", "old", "leaked", "second-worker", "leaving", "rejoin", "evicted", "evicted-unnamed",
        "group", "belief", "hostile-store",
    ),
    ("leaked", "group"),
)  # fmt: skip
FORMING: Final = Model(
    "forming",
    "forming.maude",
    "FORMING-SCENARIOS",
    "forming",
    ("changed-words", "own-certificate", "own-commitment", "two-accounts"),
    (),
)
ARRIVALS: Final = Model(
    "arrivals", "arrivals.maude", "ARRIVALS-SCENARIOS", "arrivals", ("late", "called-early"), ()
)
MODELS: Final = (SETUP, BROKER, FORMING, ARRIVALS)


def _all_done(*sessions: str) -> str:
    """The condition that the group exists for all these sessions."""
    shown = " ".join(
        f"< '{name} | R{i}:Nat, T{i}:Terms, C{i}:Cert, O{i}:Out, 'done, S{i}:Seen, L{i}:Links >"
        for i, name in enumerate(sessions)
    )
    return f"{{ CS:Checks | {shown} OBJ:Objects }} := ST:State"


_FORMED = (
    "{ CS:Checks | member(0, S:Statement, 'done) member(2, X:Statement, 'done) OBJ:Objects } "
    ":= ST:State"
)
_FORMED_LATE = (
    "{ CS:Checks | member(0, 'done, U:Nat, V:Nat) member(3, 'done, X:Nat, Y:Nat) "
    "last-came(T:Nat) OBJ:Objects } := ST:State /\\ X:Nat < T:Nat"
)
"""The condition that rank 3's first certificate had expired when the last member arrived."""
_CERTIFIED = "{ CS:Checks | pub(cert('k1, 1, U:Nat, N:Nonce, T:Nat)) OBJ:Objects } := ST:State"
_EVICTED = "{ CS:Checks | evicted('k1, M:Qid, 1, T:Nat) OBJ:Objects } := ST:State"

GOALS: Final[dict[Model, dict[str, str]]] = {
    SETUP: {
        "attempts": _all_done("a0", "a1"),
        "outsider": _all_done("a0", "a1"),
        "compromised": _all_done("a0", "a1"),
        "two-groups": _all_done("a0", "a1"),
        "three": _all_done("a0", "a1", "a2"),
        "second-worker": _all_done("a0", "a1", "a2"),
        "stolen-authority": _all_done("a0", "a1"),
        "two-runs": _all_done("a0", "a1", "b0", "b1"),
    },
    BROKER: {
        **{name: _CERTIFIED for name in BROKER.scenarios if not name.startswith("evicted")},
        "evicted": _EVICTED,
        "evicted-unnamed": _EVICTED,
    },
    FORMING: dict.fromkeys(FORMING.scenarios, _FORMED),
    ARRIVALS: dict.fromkeys(ARRIVALS.scenarios, _FORMED_LATE),
}


@dataclass(frozen=True)
class Removal:
    model: Model
    checks: tuple[str, ...]
    scenario: str
    flaw: str
    """The flaw that is found without the checks; "none" if other checks cover for them."""


def _removals(model: Model, rows: str) -> list[Removal]:
    split = [line.split() for line in rows.strip().splitlines()]
    return [
        Removal(model, tuple(checks.split("+")), scenario, flaw) for checks, scenario, flaw in split
    ]


REMOVALS: Final = [
    *_removals(
        SETUP,
        """
        possession              attempts          group-secrecy
        authority               attempts          group-secrecy
        cert-job                attempts          group-secrecy
        dates                   attempts          group-secrecy
        cert-world              attempts          group-secrecy
        revoked                 attempts          group-secrecy
        claim                   attempts          group-secrecy
        peer-evidence           stolen-authority  group-secrecy
        world                   other-world       agreement
        group                   other-group       agreement
        epoch                   attempts          agreement
        members                 outsider          group-secrecy
        members                 other-members     agreement
        settings                other-settings    agreement
        secret                  outsider          link-secrecy
        roles                   outsider          injectivity
        group-key-fresh         two-groups        group-secrecy
        every-member            three             incomplete
        ready                   three             agreement
        ready-names             second-worker     incomplete
        closed                  second-worker     agreement
        run                     two-runs          mixed-runs
        run-transcript          two-runs          mixed-runs
        label                   outsider          none
        context                 other-group       none
        context+label           outsider          link-secrecy
        context+group           other-group       key-agreement
        context+epoch           attempts          key-agreement
        duplicate               second-worker     none
        duplicate+ready-names   second-worker     incomplete
        hello-job               other-job         none
        cert-job+hello-job      other-job         agreement
        rank-in-world           outsider          none
        rank-in-world+members   outsider          group-secrecy
        sender                  outsider          none
        receiver                three             none
        dialed-rank             three             none
        own-rank                second-worker     none
        not-itself              three             none
        higher-dials            three             none
        """,
    ),
    *_removals(
        BROKER,
        """
        proof                   join              agreement
        nonce-ours              old               freshness
        nonce-time              old               freshness
        nonce-once              old               injectivity
        evidence-signed         join              agreement
        evidence-nonce          leaked            agreement
        evidence-key            join              agreement
        policy                  join              agreement
        renewal-evidence        leaked            agreement
        key-out                 evicted-unnamed   eviction
        machine-barred          evicted           eviction
        rank-barred             evicted-unnamed   eviction
        barred-at-spending      evicted           eviction
        rank-taken              second-worker     rank-taken
        out-on-rejoin           rejoin            two-holders
        leave-proof             leaving           rank-taken
        token-signed            join              secrecy
        token-time              old               freshness
        token-once              join              injectivity
        envelope                join              secrecy
        own-certificate         belief            belief
        broker-certificate      belief            belief
        expels                  group             eviction
        expiry                  group             eviction
        row-mac+attested-key    hostile-store     agreement
        row-mac                 hostile-store     none
        attested-key            hostile-store     none
        nonce-session           join              none
        barred-at-admission     evicted           none
        holder                  rejoin            none
        """,
    ),
    *_removals(
        FORMING,
        """
        signatures              changed-words     premature
        signatures              changed-words     identity
        signatures              two-accounts      agreement
        confirmations           changed-words     unverified
        commitments             own-commitment    identity
        certificates            own-certificate   identity
        own-entry               changed-words     identity
        """,
    ),
    *_removals(
        ARRIVALS,
        """
        arrivals                late              stale
        below                   late              stale
        current                 late              stale
        dates                   called-early      expired
        dates                   late              none
        arrivals+dates          late              expired
        """,
    ),
]
