"""The broker's page, as text and in a real browser."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import tempfile

import pytest

from sealring.attest.broker.server import render
from sealring.core.identity.names import WorkerName
from tests.attest.broker.local import JOB, Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (make system-deps)"
)


def get(broker: Running, path: str = "/", host: str = "127.0.0.1", method: str = "GET"):  # type: ignore[no-untyped-def]
    connection = http.client.HTTPConnection("127.0.0.1", broker.page_port, timeout=30)
    connection.request(method, path, headers={"Host": f"{host}:{broker.page_port}"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response, body


def test_it_shows_who_is_there_and_that_it_is_simulated(broker: Running) -> None:
    broker.join(0)
    broker.join(1)
    broker.revoke(1)
    response, body = get(broker)
    assert response.status == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert body.count('<span class="simulated">SIMULATED</span>') == 3
    assert body.count("revoked</span>") == 1
    assert "<script" not in body
    assert "http://" not in body.replace("http-equiv", "")


@pytest.mark.threat("B28")
def test_it_can_only_be_read_and_only_from_here(broker: Running) -> None:
    assert get(broker, method="POST")[0].status == 400
    assert get(broker, "/kbs/v0/auth")[0].status == 404
    # A name of an attacker that resolves to 127.0.0.1.
    assert get(broker, host="rebound.example")[0].status == 404


@pytest.mark.threat("B28")
def test_whatever_a_worker_shows_is_text_there() -> None:
    evil = '<script>alert(1)</script>"'
    holder = {
        "facts": {"worker": {"simulated": False, "measurement": evil, "machine": evil}},
        "kind": evil, "certificate_until": None, "attested": 0, "joined": 0, "joins": 1,
    }  # fmt: skip
    entry = {"time": 0.0, "address": evil, "error": evil, "why": evil}
    refused = {"since": 0.0, "counts": {evil: 1}, "last": [entry]}
    page = render([(WorkerName(JOB, 0), holder, False)], refused, 1.0).body.decode()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 9


@needs_chromium
@pytest.mark.threat("B28")
def test_a_browser_shows_it(broker: Running) -> None:
    assert CHROMIUM is not None
    broker.join(2)
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions",
                # Any request to another host would fail, and stderr would say so.
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--enable-logging=stderr", "--log-level=0", "--dump-dom",
                f"http://127.0.0.1:{broker.page_port}/",
            ],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<title>sealring broker</title>" in done.stdout
    assert "<td>job</td><td>2</td>" in done.stdout
    assert "SIMULATED" in done.stdout
    # The style is the one that the page's policy allows, or the browser would complain.
    assert "Content Security Policy" not in done.stderr
