"""Which request asks the broker what. Workers' routes and the page's are on different ports."""

from __future__ import annotations

import base64
import json
import time
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from sealring.broker.http import Handle, Request, Response
from sealring.broker.messages import ATTEST, AUTH, COOKIE, LEAVE, OUT, RESOURCE
from sealring.broker.page import render
from sealring.broker.service import Broker
from sealring.errors import MalformedRequest, NoSuchResource, UnknownNonce, UnknownToken
from sealring.identity.names import is_job

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


def worker_routes(broker: Broker) -> Handle:
    async def handle(request: Request) -> Response:
        path = request.path
        if path == AUTH:
            _only("POST", request)
            session, nonce, extra = await broker.challenge(request.body)
            cookie = f"{COOKIE}={session}; HttpOnly; Secure; Path=/kbs/v0"
            answer = {"nonce": base64.b64encode(nonce).decode(), "extra-params": extra}
            return _json(answer, {"set-cookie": cookie})
        if path == ATTEST:
            _only("POST", request)
            return _json({"token": await broker.attest(_session(request), request.body)})
        if path.startswith(RESOURCE):
            _only("GET", request)
            return _json(await broker.resource(_token(request), path.removeprefix(RESOURCE)))
        if path.startswith(OUT) and is_job(job := path.removeprefix(OUT)):
            _only("GET", request)
            return _json({"out": await broker.keys_out(job)})
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


def _session(request: Request) -> str:
    cookie: SimpleCookie = SimpleCookie()
    with suppress(CookieError):
        cookie.load(request.headers.get("cookie", ""))
    if COOKIE not in cookie:
        raise UnknownNonce(f"the cookie {COOKIE} is missing: ask {AUTH} first")
    return cookie[COOKIE].value


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownToken("there is no token: attest first")
    return token


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(200, json.dumps(value).encode(), headers=headers or {})
