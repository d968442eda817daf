"""A store that several brokers share: etcd, over the JSON form of its v3 interface.

A commit succeeds only if nothing that the decisions read has changed: every key that was read is
the same, and every range that was scanned has nothing newer. If another replica was faster, the
decisions are made again on the new rows.

What etcd holds is not believed (authenticated.py), and the broker sends it no key. Members on other
machines are reached only over TLS with a client certificate
(`etcd://...?ca=ca.pem&certificate=c.pem&key=c.key`), because anybody who can write there can
stop the broker.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from sealring.attest.broker.authenticated import Source, VersionNote
from sealring.attest.broker.store import LedgerStore
from sealring.attest.evidence.encoding import to_base64
from sealring.errors import BrokerUnavailable, ConfigurationError
from sealring.formats.strict import read_json

_CALL_SECONDS: Final = 2.0
_COMMIT_SECONDS: Final = 15.0
"""Longer than the election of a new leader, so that a lost leader delays joins but fails none."""
_PAUSE_SECONDS: Final = 0.1
_PAGE_ROWS: Final = 500
"""Rows in one answer. etcd's gateway refuses answers of many megabytes."""
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class EtcdStore(LedgerStore):
    def __init__(self, url: str, name: str, key: bytes, note: VersionNote | None = None) -> None:
        super().__init__(key, note)
        self._etcd = _Etcd(url)
        self._prefix = f"sealring/{name}/"
        self._start()

    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        deadline = time.monotonic() + _COMMIT_SECONDS
        while True:
            rows = _Rows(self._etcd, self._prefix, deadline)
            writes = run(rows)
            if not writes or rows.write(writes):
                return
            if time.monotonic() >= deadline:
                raise BrokerUnavailable(
                    "other replicas were faster for too long: try again",
                    code="broker.store_unavailable",
                )

    def _release(self) -> None:
        self._etcd.close()


class _Rows:
    """Rows read from etcd one by one. `write` commits only if none of them has changed since."""

    def __init__(self, etcd: _Etcd, prefix: str, deadline: float) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._deadline = deadline
        self._values: dict[str, bytes | None] = {}
        self._compares: list[dict[str, Any]] = []

    def get(self, key: str) -> bytes | None:
        if key not in self._values:
            answer = self._etcd.call("range", {"key": self._name(key)}, self._deadline)
            found = answer.get("kvs", [])
            self._values[key] = base64.b64decode(found[0]["value"]) if found else None
            revision = found[0]["mod_revision"] if found else "0"
            self._compares.append(
                {
                    "key": self._name(key),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": revision,
                }
            )
        return self._values[key]

    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]:
        span: dict[str, Any] = {"key": self._name(start), "range_end": self._name(end)}
        asked, revision = {**span, "limit": _PAGE_ROWS}, 0
        found: list[tuple[str, bytes]] = []
        more = True
        while more:
            answer = self._etcd.call("range", asked, self._deadline)
            revision = revision or int(answer["header"]["revision"])
            page = [
                (base64.b64decode(one["key"]), base64.b64decode(one["value"]))
                for one in answer.get("kvs", [])
            ]
            found += [(name.decode().removeprefix(self._prefix), value) for name, value in page]
            more = bool(answer.get("more")) and bool(page)
            if more:
                # All pages are read at the revision of the first one.
                after = to_base64(page[-1][0] + b"\0")
                asked = {**asked, "key": after, "revision": str(revision)}
        # Holds for all keys of the range, also for keys that do not exist yet.
        self._compares.append(
            {**span, "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}
        )
        return found

    def write(self, writes: dict[str, bytes | None]) -> bool:
        actions = [
            {"request_delete_range": {"key": self._name(key)}}
            if value is None
            else {"request_put": {"key": self._name(key), "value": to_base64(value)}}
            for key, value in writes.items()
        ]
        request = {"compare": self._compares, "success": actions}
        return bool(self._etcd.call("txn", request, self._deadline).get("succeeded"))

    def _name(self, key: str) -> str:
        return to_base64((self._prefix + key).encode())


class _Etcd:
    """Sends each call to a member of the cluster, and to the next one if it does not answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._members = [member for member in parts.netloc.split(",") if member]
        options = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.scheme != "etcd" or not self._members or set(options) - set(_TLS_OPTIONS):
            raise ConfigurationError(
                f"the store {url} is not etcd://HOST:PORT[,HOST:PORT...], with "
                f"?{'=...&'.join(_TLS_OPTIONS)}=... for TLS"
            )
        self._tls = _tls(options) if options else None
        remote = [member for member in self._members if _host(member) not in _LOOPBACK]
        if self._tls is None and remote:
            raise ConfigurationError(
                f"etcd at {remote[0]} is on another machine and would be spoken to in the clear: "
                f"add ?{'=FILE&'.join(_TLS_OPTIONS)}=FILE, with a client's certificate"
            )
        self._connection: http.client.HTTPConnection | None = None

    def call(self, verb: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        body = json.dumps(request).encode()
        problem: Exception | None = None
        while time.monotonic() < deadline:
            try:
                return self._ask(verb, body)
            except (OSError, http.client.HTTPException, ValueError, _Refused) as error:
                problem = error
                self.close()
                self._members.append(self._members.pop(0))
                time.sleep(_PAUSE_SECONDS)
        raise BrokerUnavailable(
            f"no member of etcd answers: {problem}", code="broker.store_unavailable"
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, verb: str, body: bytes) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._connect(self._members[0])
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v3/kv/{verb}", body, headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != http.client.OK:
            # For example 503 while there is no leader.
            raise _Refused(f"{response.status} {content[:200]!r}")
        answer: dict[str, Any] = read_json(content)
        return answer

    def _connect(self, member: str) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(member, timeout=_CALL_SECONDS)
        return http.client.HTTPSConnection(member, timeout=_CALL_SECONDS, context=self._tls)


class _Refused(Exception):
    """A member answered with an error."""


_TLS_OPTIONS: Final = ("ca", "certificate", "key")


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    if set(options) != set(_TLS_OPTIONS):
        raise ConfigurationError(f"etcd over TLS needs {', '.join(_TLS_OPTIONS)} together")
    try:
        context = ssl.create_default_context(cafile=options["ca"])
        context.load_cert_chain(options["certificate"], options["key"])
    except (OSError, ssl.SSLError) as problem:
        raise ConfigurationError(f"etcd's certificates cannot be read: {problem}") from None
    return context


def _host(member: str) -> str:
    return urlsplit(f"//{member}").hostname or ""
