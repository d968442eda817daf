"""A worker's certificate from a broker: requested once per process, renewed while it trains.

The private key is made here and never leaves the process. When about half of the certificate's time
has passed, a thread sends fresh evidence to the broker. Each answer also lists the keys that are
out of the job. A group that has such a member ends on every rank; other groups go on.

Security does not depend on that thread. The certificate's end is also a lease, which the native
threads that move records check (native/record/lease.hpp). A renewal extends the lease only after
the groups with a revoked member were ended. So a revoked worker has no group left once the
configured minutes have passed, whether or not any renewal succeeds.

A process that ends without an unhandled exception gives its rank back.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native
from sealring.attest.broker.client import (
    Answered,
    BrokerClient,
    Conversation,
    Joined,
    ask_vault,
    tell_vault,
)
from sealring.attest.broker.clock import boottime
from sealring.attest.broker.messages import broker_urls
from sealring.attest.evidence import Policy
from sealring.attest.evidence.admission import PolicyAdmission, key_digest
from sealring.attest.evidence.attesters import Attester, Wanted, find_attester
from sealring.attest.evidence.cache import read_policy, trust_in
from sealring.core.hooks import Expellable, VaultEntry
from sealring.core.identity.credentials import Credentials, read_authorities
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName, check_job
from sealring.core.identity.process import shut_out_debuggers
from sealring.core.no_fork import OwnLock
from sealring.core.settings import (
    AUTHORITY,
    BROKER,
    CACHE,
    CERTIFICATE,
    JOB,
    KEY,
    POLICY,
    SECRET,
    SECRET_FILE,
)
from sealring.errors import (
    BrokerRefusal,
    BrokerUnavailable,
    ConfigurationError,
    NoLongerAdmitted,
    SealringError,
    named,
)

T = TypeVar("T")
_LOG = logging.getLogger("sealring")
_NEEDED: Final = (AUTHORITY, POLICY, JOB)
_OTHERS: Final = (SECRET, SECRET_FILE, CERTIFICATE, KEY)
_EARLIEST, _LATEST = 0.4, 0.6
"""A certificate is renewed at a random point between these parts of its time, so that workers do
not all renew at once."""
_ASK_SECONDS: Final = 10.0
_JOIN_SECONDS: Final = 60.0
"""The longest time that a worker waits for a broker that it has never reached."""
_LEAVE_SECONDS: Final = 3.0
_PAUSE: Final = 2.0
"""Seconds between two tries to renew, if the broker answered with an error."""
_FINAL: Final = {"broker.worker_revoked", "broker.rank_taken"}
"""Errors after which no other try helps: the broker has decided against this key."""


@dataclass(frozen=True, slots=True)
class EnrolmentSettings:
    brokers: list[tuple[str, int]]
    authorities: tuple[x509.Certificate, ...]
    policy: Policy
    cache: Path | None
    job: str


class BrokerEnrolment:
    def __init__(
        self,
        settings: EnrolmentSettings,
        name: WorkerName,
        world: int,
        attester: Attester,
        deadline: float,
    ) -> None:
        self._settings = settings
        self._name = name
        self._world = world
        self._attester = attester
        self._process = _native.ProcessMark()
        # A private key is any 32 random bytes in RFC 8032.
        self._kept_key = KeptKey.of_seed(_native.Secret.random(32))
        self._trust = trust_in(settings.policy, settings.cache)
        self._client = BrokerClient(settings.brokers, settings.authorities)
        self._lock = threading.Lock()
        self._groups: weakref.WeakKeyDictionary[Expellable, dict[int, str]]
        self._groups = weakref.WeakKeyDictionary()
        self._failure: SealringError | None = None
        self._stop = threading.Event()
        self.lease = _native.Lease()
        """The groups' lease. It ends with the certificate."""
        self._joined = self._join(min(_JOIN_SECONDS, max(0.0, deadline - time.monotonic())))
        self._extend_lease(self._joined)
        threading.Thread(target=self._keep_renewed, name="sealring-renewal", daemon=True).start()
        atexit.register(self._leave)

    def credentials(self, deadline: float) -> Credentials:
        """Credentials for a new group: the newest certificate, and the keys that are out by now."""
        self._process.require("this worker's enrolment")
        # If the broker accepts the request but never answers, the group still needs time to form.
        left = max(0.0, deadline - time.monotonic())
        self._ask_who_is_out(min(_ASK_SECONDS, left / 4))
        return self.renewed_credentials()

    def renewed_credentials(self) -> Credentials:
        """Credentials for a new link of a running group: the newest certificate, and the keys that
        were out at the last renewal. A member that went out later ends the group at the next one.
        """
        self._process.require("this worker's enrolment")
        with self._lock:
            if self._failure is not None:
                raise self._failure
            joined = self._joined
        if self.lease.ended:
            raise NoLongerAdmitted(
                f"the certificate of rank {self._name.rank} has ended, and the broker did not "
                "renew it: start this worker again",
                peer=self._name.rank,
            )
        if key_digest(joined.certificate) in joined.keys_out:
            # Its peers would refuse it. Better to say so than to wait for them.
            raise BrokerRefusal(
                f"rank {self._name.rank} was taken out of job {self._name.job}",
                code="broker.worker_revoked",
            )
        admission = PolicyAdmission(
            self._settings.policy, self._trust, joined.keys_out, joined.evidence
        )
        return Credentials(
            self._name.job,
            self._name.rank,
            joined.certificate,
            self._settings.authorities,
            self._kept_key,
            admission,
        )

    def data_key(self, path: str) -> bytes:
        self._process.require("this worker's enrolment")
        with self._lock:
            keys = self._joined.data_keys
        if path not in keys:
            raise BrokerRefusal(
                f"the broker gave this worker no {path}; it gave {', '.join(keys) or 'none'}",
                code="broker.no_such_resource",
            )
        return keys[path]

    def ask(self, say: Callable[[WorkerName, Ed25519PrivateKey], Conversation[T]]) -> T:
        """Asks the broker, with a request that this worker's key signs."""
        self._process.require("this worker's enrolment")
        return _run(self._client.ask(say(self._name, self._key), _JOIN_SECONDS))

    def watch(self, group: Expellable, keys: dict[int, str]) -> None:
        """End the group as soon as the holder of one of `keys` (by rank in the group) is out."""
        with self._lock:
            self._groups[group] = keys
            failure = self._failure
        self._expel_who_is_out()
        if failure is not None:  # the renewal failed while the group formed
            _expel_self(group, failure)

    def close(self) -> None:
        self._stop.set()

    @property
    def certificate(self) -> x509.Certificate:
        with self._lock:
            return self._joined.certificate

    @property
    def _key(self) -> Ed25519PrivateKey:
        key = self._kept_key.load()
        assert isinstance(key, Ed25519PrivateKey)
        return key

    def _join(self, seconds: float) -> Joined:
        return _run(self._client.join(self._name, self._world, self._key, self._attester, seconds))

    def _keep_renewed(self) -> None:
        """Renews until the certificate ends or the broker decides against this worker."""
        due = self._when_due()
        while not self._stop.wait(due):
            try:
                self.renew()
                due = self._when_due()
                continue
            except Exception as problem:
                # After any other error the certificate is still good until it ends.
                if named(problem) in _FINAL or self._left() == 0.0:
                    self._end(problem)
                    return
                _LOG.warning(
                    "sealring: rank %d was not renewed, and is admitted for %.0f s more: %s: %s",
                    self._name.rank, self._left(), named(problem), problem,
                )  # fmt: skip
            due = min(_PAUSE, self._left())

    def renew(self) -> None:
        """Gets a new certificate, and ends the groups that have a member who is out."""
        joined = self._join(self._left())
        with self._lock:
            self._joined = joined
        # Before the lease is extended: our renewal must not give time to a revoked member.
        self._expel_who_is_out()
        self._extend_lease(joined)
        _LOG.info("sealring: the certificate of rank %d was renewed", self._name.rank)

    def _extend_lease(self, joined: Joined) -> None:
        wall = joined.certificate.not_valid_after_utc.timestamp()
        self.lease.extend(int(joined.boottime_end * 1e9), int(wall * 1e9))

    def _when_due(self) -> float:
        return random.uniform(_EARLIEST, _LATEST) * self._left()  # noqa: S311

    def _left(self) -> float:
        with self._lock:
            joined = self._joined
        wall = joined.certificate.not_valid_after_utc.timestamp() - time.time()
        return max(0.0, min(wall, joined.boottime_end - boottime()))

    def _leave(self) -> None:
        """At exit, gives the rank back: the key that holds it ends with the process."""
        # A forked child is not this worker. A worker that failed is left for its operator.
        failed = getattr(sys, "last_value", None) is not None
        if not self._process.here or failed or self._stop.is_set() or self._failure is not None:
            return
        self._stop.set()
        try:
            asyncio.run(self._client.leave(self._name, self._key, _LEAVE_SECONDS))
        except Exception as problem:
            _LOG.warning("sealring: the broker was not told that this worker ended: %s", problem)

    def _ask_who_is_out(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                before = self._joined
            try:
                left = max(0.0, end - time.monotonic())
                out = _run(self._client.keys_out(self._name.job, left))
            except BrokerUnavailable as error:
                # The list of the last renewal still holds, until the certificate ends.
                _LOG.warning("sealring: who is out of the job is as of the last renewal: %s", error)
                return
            with self._lock:
                if self._joined is before:
                    self._joined = replace(before, keys_out=out)
                    return
            # A renewal came in between, and this answer may be older than its list: ask again.

    def _expel_who_is_out(self) -> None:
        with self._lock:
            out, groups = self._joined.keys_out, list(self._groups.items())
        for group, keys in groups:
            for member in [member for member, key in keys.items() if key in out]:
                group.expel(member, "was taken out of the job by the broker, or not renewed")

    def _end(self, problem: Exception) -> None:
        error = (
            problem
            if isinstance(problem, SealringError)
            else NoLongerAdmitted(
                f"the certificate of rank {self._name.rank} could not be renewed: "
                f"{named(problem)}: {problem}",
                peer=self._name.rank,
            )
        )
        _LOG.error("sealring: rank %d was not renewed: %s", self._name.rank, problem)
        with self._lock:
            self._failure = error
            groups = list(self._groups)
        for group in groups:
            _expel_self(group, error)


def _expel_self(group: Expellable, why: SealringError) -> None:
    group.expel(-1, f"this worker was not renewed: {named(why)}: {why}")


def _run(conversation: Coroutine[Any, Any, T]) -> T:
    """Runs the conversation to its end, also where the calling script runs in an event loop."""
    try:
        if not _in_an_event_loop():
            return asyncio.run(conversation)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, conversation).result()
    finally:
        conversation.close()  # needed if it was never begun: no loop or no thread could be made


def _in_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_enrolments: Final[dict[tuple[int, str, str, int, int], BrokerEnrolment]] = {}
_making: Final = OwnLock()


def enrolled(rank: int, world: int, environ: Mapping[str, str], deadline: float) -> BrokerEnrolment:
    """This process's enrolment as that rank. The first call joins."""
    settings = read_settings(environ)
    shut_out_debuggers(environ)
    # A forked child has its parent's key in its memory and must not use it: it joins by itself.
    key = (os.getpid(), BROKER.read(environ) or "", settings.job, rank, world)
    with _making:
        if key not in _enrolments:
            name = WorkerName(settings.job, rank)
            attester = find_attester(environ, Wanted.by(settings.policy))
            _enrolments[key] = BrokerEnrolment(settings, name, world, attester, deadline)
        return _enrolments[key]


def data_key(path: str, timeout: float = 300.0) -> bytes:
    """A data key that the policy grants this worker. RANK and WORLD_SIZE say which worker it is."""
    return this_worker(timeout).data_key(path)


def this_worker(timeout: float = 300.0) -> BrokerEnrolment:
    """This process's enrolment. RANK and WORLD_SIZE say which worker it is."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "RANK and WORLD_SIZE are not set: start with `sealring run`"
        ) from None
    return enrolled(rank, world, os.environ, time.monotonic() + timeout)


class RecordsOfVault:
    """The broker's records of one vault, read and written in this worker's name."""

    def __init__(self, vault: str) -> None:
        self._vault = vault

    def read(self) -> Answered:
        return this_worker().ask(lambda name, own: ask_vault(name, own, self._vault))

    def record(self, key: int, generation: int, entry: VaultEntry | None) -> Answered:
        return this_worker().ask(
            lambda name, own: tell_vault(name, own, self._vault, key, generation, entry)
        )


def read_settings(environ: Mapping[str, str]) -> EnrolmentSettings:
    authority, policy, job = (row.read(environ) or "" for row in _NEEDED)
    if missing := [row.name for row in _NEEDED if not row.read(environ)]:
        raise ConfigurationError(f"with SEALRING_BROKER, {' and '.join(missing)} must be set too")
    if others := [row.name for row in _OTHERS if row.read(environ)]:
        raise ConfigurationError(
            f"SEALRING_BROKER and {' and '.join(others)} are set: a worker has one identity"
        )
    cache = CACHE.read(environ)
    return EnrolmentSettings(
        brokers=broker_urls(BROKER.read(environ) or ""),
        authorities=read_authorities(Path(authority)),
        policy=read_policy(Path(policy))[0],
        cache=Path(cache) if cache else None,
        job=check_job(job),
    )
