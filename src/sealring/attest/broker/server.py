"""The broker on its ports: TLS for workers, the status page for this host, and periodic chores."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from sealring.attest.broker.keys import SERVER_DAYS, BrokerKeys, issue_to_self
from sealring.attest.broker.messages import (
    ATTEST,
    AUTH,
    COOKIE,
    LEAVE,
    OUT,
    READ,
    RECORD,
    RESOURCE,
    response_of,
)
from sealring.attest.broker.service import Broker
from sealring.attest.broker.store import Row
from sealring.attest.broker.tls import answer, server_context
from sealring.attest.evidence.encoding import to_base64
from sealring.core.identity.names import WorkerName, is_job
from sealring.errors import (
    BrokerRefusal,
    ConfigurationError,
    MalformedRequest,
    SealringError,
    named,
)
from sealring.formats.http import (
    Explain,
    Handle,
    HttpListener,
    HttpStream,
    PlainStream,
    Request,
    Response,
    ServerLimits,
)

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #ddd; }
code { font-family: ui-monospace, monospace; font-size: 13px; }
.bad { color: #a40000; font-weight: 600; }
.simulated { background: #ffe9b3; padding: 0 .4rem; font-weight: 600; }
"""
_COLUMNS: Final = (
    "job", "rank", "evidence", "measurement", "machine", "verified", "certificate ends", "joined",
    "verdict",
)  # fmt: skip
_SHOWN: Final = 16
_REFUSALS_SHOWN: Final = 10


def render(holders: Sequence[tuple[WorkerName, Row, bool]], refused: Row, now: float) -> Response:
    simulated = sum(holder["facts"]["worker"]["simulated"] for _, holder, _ in holders)
    warning = (
        f'<p><span class="simulated">SIMULATED</span> evidence proves nothing: {simulated} of '
        f"{len(holders)} workers show it.</p>"
        if simulated
        else ""
    )
    html = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>sealring broker</title>
<meta http-equiv="refresh" content="10"><style>{_STYLE}</style></head>
<body><h1>sealring broker</h1>{warning}
{_table(_COLUMNS, [_row(name, holder, out, now) for name, holder, out in holders])}
<p>{len(holders)} ranks are held. {_time(now)}</p>
{_refused(refused)}</body></html>"""
    digest = to_base64(hashlib.sha256(_STYLE.encode()).digest())
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return Response(200, html.encode(), "text/html; charset=utf-8", headers)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. The cells are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _refused(refused: Row) -> str:
    """The requests that were refused before anything was proven: counts, and the newest ones."""
    counts, last = refused["counts"], refused["last"]
    if not counts:
        return "<p>Nothing was refused before it proved anything.</p>"
    kinds = ", ".join(f"{escape(name)} {counts[name]}" for name in sorted(counts))
    rows = [
        [_time(one["time"]), *(escape(one[name]) for name in ("address", "error", "why"))]
        for one in reversed(last[-_REFUSALS_SHOWN:])
    ]
    return (
        f"<h2>Refused before anything was proven</h2><p>{sum(counts.values())} since "
        f"{_time(refused['since'])}: {kinds}. The last of them:</p>"
        f"{_table(('time', 'address', 'error', 'why'), rows)}"
    )


def _row(name: WorkerName, holder: Row, out: bool, now: float) -> list[str]:
    worker, until = holder["facts"]["worker"], holder["certificate_until"]
    kind = escape(holder["kind"])
    ended = until is not None and until < now
    verdict = "revoked" if out else "certificate ended" if ended else "admitted"
    return [
        escape(name.job),
        str(name.rank),
        f'<span class="simulated">{kind}</span>' if worker["simulated"] else kind,
        _digest(worker["measurement"]),
        _digest(worker["machine"]),
        f"{_age(now - holder['attested'])} ago",
        "not issued yet" if until is None else _time(until),
        f"{_time(holder['joined'])} (join {holder['joins']})",
        f'<span class="bad">{verdict}</span>' if out or ended else verdict,
    ]


def _digest(text: str) -> str:
    if not text:
        return "-"
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return f'<code title="{escape(text, quote=True)}">{escape(short)}</code>'


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(0.0, seconds))} s"


LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


def worker_routes(broker: Broker) -> Handle:
    async def handle(request: Request) -> Response:
        path = request.path
        if path == AUTH:
            _only("POST", request)
            session, nonce, extra = await broker.challenge(request.body)
            answer = {"nonce": to_base64(nonce), "extra-params": extra}
            return _json(answer, {"set-cookie": _cookie(session)})
        if path == ATTEST:
            _only("POST", request)
            return await _attest(broker, request)
        if path.startswith(RESOURCE):
            _only("GET", request)
            return _json(await _resource(broker, request))
        if path.startswith(OUT) and is_job(job := path.removeprefix(OUT)):
            _only("GET", request)
            return _json({"out": await broker.keys_out(job)})
        if path in (READ, RECORD):
            _only("POST", request)
            ask = broker.read_vault if path == READ else broker.record_vault
            return _json(await ask(request.body))
        if path == LEAVE:
            _only("POST", request)
            await broker.leave(request.body)
            return _json({})
        raise BrokerRefusal("the broker has nothing there", code="broker.no_such_resource")

    return handle


def page_routes(broker: Broker) -> Handle:
    async def handle(request: Request) -> Response:
        _only("GET", request)
        # A check of the Host header, against a script of another site whose name resolves to here.
        host = request.headers.get("host", "").rpartition(":")[0]
        if request.path != "/" or host not in LOOPBACK:
            raise BrokerRefusal(
                "the broker's page is at / of this host's own address",
                code="broker.no_such_resource",
            )
        return render(await broker.holders(), await broker.refused(), time.time())

    return handle


def _only(method: str, request: Request) -> None:
    if request.method != method:
        raise MalformedRequest(f"{method} is the only method here")


async def _attest(broker: Broker, request: Request) -> Response:
    session = _session(request)
    if session is None:
        raise BrokerRefusal(
            f"the cookie {COOKIE} is missing: ask {AUTH} first", code="broker.unknown_nonce"
        )
    token = await broker.attest(session, request.body)
    return _json({"token": token}, {"set-cookie": _cookie(session)})


async def _resource(broker: Broker, request: Request) -> dict[str, str]:
    """Gives a resource for a token or, as stock KBS clients ask, for a session cookie.

    If both are there, the token counts. The path is taken as it came: nothing is decoded or
    resolved, and a query is part of it.
    """
    path = request.path.removeprefix(RESOURCE)
    if "authorization" in request.headers:
        return await broker.resource(_token(request), path)
    session = _session(request)
    if session is None:
        raise BrokerRefusal(
            "there is no token and no session: attest first", code="broker.unknown_token"
        )
    return await broker.resource_of_session(session, path)


def _cookie(session: str) -> str:
    return f"{COOKIE}={session}; HttpOnly; Secure; Path=/kbs/v0"


def _session(request: Request) -> str | None:
    cookie: SimpleCookie = SimpleCookie()
    with suppress(CookieError):
        cookie.load(request.headers.get("cookie", ""))
    return cookie[COOKIE].value if COOKIE in cookie else None


def _token(request: Request) -> str:
    scheme, _, token = request.headers["authorization"].partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise BrokerRefusal(
            "the authorization is not a token: attest first", code="broker.unknown_token"
        )
    return token


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(200, json.dumps(value).encode(), headers=headers or {})


_LOG = logging.getLogger("sealring.attest.broker")
_SWEEP_SECONDS: Final = 30.0
_OWN_CERTIFICATE_SECONDS: Final = SERVER_DAYS * 86400 / 4


class Server:
    """The broker's TLS port and its page without TLS, with one set of limits."""

    def __init__(
        self, keys: BrokerKeys, names: Sequence[str], limits: ServerLimits, explain: Explain
    ) -> None:
        self._keys = keys
        self._names = names
        self._listener = HttpListener(limits, explain)
        self.renew_own_certificate()

    def renew_own_certificate(self) -> None:
        self._context = server_context(*issue_to_self(self._keys, self._names))

    def listening(
        self, host: str, port: int, routes: Handle, *, tls: bool = True
    ) -> AbstractAsyncContextManager[int]:
        """Yields the port. The system chooses it if `port` is 0."""
        if tls:
            return self._listener.listening(host, port, routes, self._over_tls)
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigurationError(
                f"the page is served on this host's own address only, and {host} is not: look at "
                "it through `ssh -L`"
            )
        return self._listener.listening(host, port, routes, PlainStream)

    def _over_tls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpStream:
        return answer(reader, writer, self._context)


@asynccontextmanager
async def serving(
    broker: Broker,
    keys: BrokerKeys,
    *,
    listen: tuple[str, int],
    page: tuple[str, int] | None,
    names: Sequence[str],
    limits: ServerLimits,
    publish: Callable[[], object] | None = None,
) -> AsyncIterator[tuple[int, int | None]]:
    """Runs a broker that answers requests. Yields its port and its page's port.

    `publish` shows the audit log to its readers and witnesses. It may take seconds.
    """
    _raise_descriptor_limit()
    await broker.open()

    def explain(error: SealringError, address: str, path: str) -> Response:
        if not error.audited:
            broker.strangers.note(error, address, time.time())
        return response_of(error, path)

    server = Server(keys, names, limits, explain)
    chores = asyncio.create_task(run_chores(broker, server, publish))
    try:
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(server.listening(*listen, worker_routes(broker)))
            page_port = None
            if page is not None:
                page_port = await stack.enter_async_context(
                    server.listening(*page, page_routes(broker), tls=False)
                )
            yield port, page_port
    finally:
        chores.cancel()
        with contextlib.suppress(SealringError):
            await broker.keep_refusals()
        broker.close()


async def run_chores(broker: Broker, server: Server, publish: Callable[[], object] | None) -> None:
    renewed = time.monotonic()
    while True:
        if publish is not None:
            with _told():
                await asyncio.to_thread(publish)
        await asyncio.sleep(_SWEEP_SECONDS)
        with _told():
            while await broker.sweep():
                await asyncio.sleep(0)
        with _told():
            await broker.keep_refusals()
        if time.monotonic() - renewed > _OWN_CERTIFICATE_SECONDS:
            with _told():
                server.renew_own_certificate()
                renewed = time.monotonic()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Logs a chore's failure, whatever it is. The chore is tried again, and the others go on."""
    try:
        yield
    except Exception as error:
        _LOG.error("%s: %s", named(error), error)


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
