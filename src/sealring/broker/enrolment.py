"""A worker's certificate from a broker: joined for once per process, renewed while it trains.

The key is made here and never leaves. A thread brings fresh evidence to the broker when half of the
certificate's time is over, and with each answer learns who is out of the job. Groups go on as they
are; one that has a member who is out is ended on every rank. Where no broker can be reached until
the certificate ends, the groups are ended too: so a worker that was revoked has nobody left to talk
to when the configured minutes are over, even if it can cut others off from the broker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native
from sealring.broker.attesters import Attester, find_attester
from sealring.broker.client import BrokerClient, Joined
from sealring.broker.messages import broker_urls
from sealring.errors import (
    BrokerUnreachable,
    ConfigurationError,
    NoSuchResource,
    SealringError,
    StoreUnavailable,
    TooManyRequests,
    WorkerRevoked,
)
from sealring.identity.attestation import Policy
from sealring.identity.attestation.admission import Admission, key_digest
from sealring.identity.attestation.files import read_policy, trust_in
from sealring.identity.credentials import Credentials, read_authorities
from sealring.identity.names import WorkerName, check_job
from sealring.identity.process import shut_out_debuggers

T = TypeVar("T")
_LOG = logging.getLogger("sealring")
_NEEDED: Final = ("SEALRING_AUTHORITY", "SEALRING_POLICY", "SEALRING_JOB")
_EARLIEST, _LATEST = 0.4, 0.6
"""The parts of a certificate's time between which it is renewed: not by all workers at once."""
_ASK_SECONDS: Final = 10.0


class Expellable(Protocol):
    """A group, as far as it matters here."""

    def expel(self, member: int, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    brokers: list[tuple[str, int]]
    authorities: tuple[x509.Certificate, ...]
    policy: Policy
    cache: Path | None
    job: str


class Enrolment:
    def __init__(
        self, settings: Settings, name: WorkerName, world: int, attester: Attester, deadline: float
    ) -> None:
        self._settings = settings
        self._name = name
        self._world = world
        self._attester = attester
        self._process = _native.ProcessMark()
        self._seed = _native.Secret.random(32)
        """The private key, which in RFC 8032 is any 32 random bytes."""
        self._trust = trust_in(settings.policy, settings.cache)
        self._client = BrokerClient(settings.brokers, settings.authorities)
        self._lock = threading.Lock()
        self._groups: weakref.WeakKeyDictionary[Expellable, dict[int, str]]
        self._groups = weakref.WeakKeyDictionary()
        self._failure: SealringError | None = None
        self._stop = threading.Event()
        self._joined = self._join(max(0.0, deadline - time.monotonic()))
        threading.Thread(target=self._renew, name="sealring-renewal", daemon=True).start()

    def credentials(self, deadline: float) -> Credentials:
        """For a new group: the newest certificate, and who is out by now."""
        self._process.require("this worker's enrolment")
        self._ask_who_is_out(min(_ASK_SECONDS, max(0.0, deadline - time.monotonic())))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            joined = self._joined
        if key_digest(joined.certificate) in joined.keys_out:
            # Its peers would refuse it; better to say so than to wait for them.
            raise WorkerRevoked(f"rank {self._name.rank} was taken out of job {self._name.job}")
        admission = Admission(self._settings.policy, self._trust, joined.keys_out, joined.evidence)
        return Credentials(
            self._name.job,
            self._name.rank,
            joined.certificate,
            self._settings.authorities,
            self._key,
            admission,
        )

    def data_key(self, path: str) -> bytes:
        self._process.require("this worker's enrolment")
        with self._lock:
            keys = self._joined.data_keys
        if path not in keys:
            raise NoSuchResource(
                f"the broker gave this worker no {path}; it gave {', '.join(keys) or 'none'}"
            )
        return keys[path]

    def watch(self, group: Expellable, keys: dict[int, str]) -> None:
        """From here on the group ends when one of these keys (by rank in the group) is out."""
        with self._lock:
            self._groups[group] = keys
        self._expel_who_is_out()

    def close(self) -> None:
        self._stop.set()

    @property
    def certificate(self) -> x509.Certificate:
        with self._lock:
            return self._joined.certificate

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(memoryview(self._seed))

    def _join(self, seconds: float) -> Joined:
        return _run(self._client.join(self._name, self._world, self._key, self._attester, seconds))

    def _renew(self) -> None:
        while True:
            part = random.uniform(_EARLIEST, _LATEST)  # noqa: S311
            if self._stop.wait(part * self._left()):
                return
            try:
                joined = self._join(self._left())
            except SealringError as error:
                self._end(error)
                return
            with self._lock:
                self._joined = joined
            _LOG.info("sealring: the certificate of rank %d was renewed", self._name.rank)
            self._expel_who_is_out()

    def _left(self) -> float:
        return max(0.0, self.certificate.not_valid_after_utc.timestamp() - time.time())

    def _ask_who_is_out(self, seconds: float) -> None:
        try:
            out = _run(self._client.keys_out(self._name.job, seconds))
        except (BrokerUnreachable, StoreUnavailable, TooManyRequests) as error:
            # What the last renewal said still holds, and ends with the certificate.
            _LOG.warning("sealring: who is out of the job is as of the last renewal: %s", error)
            return
        with self._lock:
            joined = self._joined
            self._joined = Joined(joined.certificate, joined.evidence, out, joined.data_keys)

    def _expel_who_is_out(self) -> None:
        with self._lock:
            out, groups = self._joined.keys_out, list(self._groups.items())
        for group, keys in groups:
            for member in [member for member, key in keys.items() if key in out]:
                group.expel(member, f"rank {member} was taken out of the job by the broker")

    def _end(self, error: SealringError) -> None:
        _LOG.error("sealring: rank %d was not renewed: %s", self._name.rank, error)
        with self._lock:
            self._failure = error
            groups = list(self._groups)
        for group in groups:
            group.expel(-1, f"this worker was not renewed: {type(error).__name__}: {error}")


def _run(conversation: Coroutine[Any, Any, T]) -> T:
    """To its end, also where the script itself runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(conversation)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, conversation).result()


_enrolments: Final[dict[tuple[int, str, str, int, int], Enrolment]] = {}
_making = threading.Lock()


def enrolled(rank: int, world: int, environ: Mapping[str, str], deadline: float) -> Enrolment:
    """This process's enrolment as that rank; the first call joins."""
    settings = read_settings(environ)
    shut_out_debuggers(environ)
    # A forked child has its parent's key in its memory and must not be it.
    key = (os.getpid(), environ["SEALRING_BROKER"], settings.job, rank, world)
    with _making:
        if key not in _enrolments:
            name = WorkerName(settings.job, rank)
            attester = find_attester(environ, settings.policy)
            _enrolments[key] = Enrolment(settings, name, world, attester, deadline)
        return _enrolments[key]


def data_key(path: str, timeout: float = 300.0) -> bytes:
    """A data key that the policy grants this worker, as torchrun's environment numbers it."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "RANK and WORLD_SIZE are not set: start with `sealring run`"
        ) from None
    return enrolled(rank, world, os.environ, time.monotonic() + timeout).data_key(path)


def read_settings(environ: Mapping[str, str]) -> Settings:
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise ConfigurationError(f"with SEALRING_BROKER, {' and '.join(missing)} must be set too")
    others = [
        name
        for name in (
            "SEALRING_SECRET",
            "SEALRING_SECRET_FILE",
            "SEALRING_CERTIFICATE",
            "SEALRING_KEY",
        )
        if environ.get(name)
    ]
    if others:
        raise ConfigurationError(
            f"SEALRING_BROKER and {' and '.join(others)} are set: a worker has one identity"
        )
    cache = environ.get("SEALRING_CACHE")
    return Settings(
        brokers=broker_urls(environ["SEALRING_BROKER"]),
        authorities=read_authorities(Path(environ["SEALRING_AUTHORITY"])),
        policy=read_policy(Path(environ["SEALRING_POLICY"]))[0],
        cache=Path(cache) if cache else None,
        job=check_job(environ["SEALRING_JOB"]),
    )
