"""Which request asks the broker what. Workers' routes and the page's are on different ports."""

from __future__ import annotations

import base64
import json
import time
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from sealring.attest.broker.messages import ATTEST, AUTH, COOKIE, LEAVE, OUT, RESOURCE
from sealring.attest.broker.page import render
from sealring.attest.broker.service import Broker
from sealring.attest.broker.vault_messages import READ, RECORD
from sealring.core.identity.names import is_job
from sealring.errors import MalformedRequest, NoSuchResource, UnknownNonce, UnknownToken
from sealring.formats.http import Handle, Request, Response

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


def worker_routes(broker: Broker) -> Handle:
    async def handle(request: Request) -> Response:
        path = request.path
        if path == AUTH:
            _only("POST", request)
            session, nonce, extra = await broker.challenge(request.body)
            answer = {"nonce": base64.b64encode(nonce).decode(), "extra-params": extra}
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
        raise NoSuchResource("the broker has nothing there")

    return handle


def page_routes(broker: Broker) -> Handle:
    async def handle(request: Request) -> Response:
        _only("GET", request)
        # Another site's script that has its name lead here must not read it.
        host = request.headers.get("host", "").rpartition(":")[0]
        if request.path != "/" or host not in LOOPBACK:
            raise NoSuchResource("the broker's page is at / of this host's own address")
        return render(await broker.holders(), await broker.refused(), time.time())

    return handle


def _only(method: str, request: Request) -> None:
    if request.method != method:
        raise MalformedRequest(f"{method} is the only method here")


async def _attest(broker: Broker, request: Request) -> Response:
    session = _session(request)
    if session is None:
        raise UnknownNonce(f"the cookie {COOKIE} is missing: ask {AUTH} first")
    token = await broker.attest(session, request.body)
    return _json({"token": token}, {"set-cookie": _cookie(session)})


async def _resource(broker: Broker, request: Request) -> dict[str, str]:
    """By the token, or, as stock KBS clients ask, by the session. A token counts before a cookie.

    The path is taken as it came: nothing is decoded or resolved, and a query belongs to it.
    """
    path = request.path.removeprefix(RESOURCE)
    if "authorization" in request.headers:
        return await broker.resource(_token(request), path)
    session = _session(request)
    if session is None:
        raise UnknownToken("there is no token and no session: attest first")
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
        raise UnknownToken("the authorization is not a token: attest first")
    return token


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(200, json.dumps(value).encode(), headers=headers or {})
