"""Metrics of a machine's workers: the text, the dashboard that reads it, and the port."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError
from sealring.observe.exporter import (
    METRICS,
    MOST_CONNECTIONS,
    SILENT,
    Exporter,
    as_text,
    parse_address,
    server_tls,
)
from sealring.observe.status import (
    Count,
    ErrorStatus,
    GroupStatus,
    PeerStatus,
    WorkerStatus,
)
from tests.attest.broker.test_etcd_tls import Files
from tests.ports import free_port

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "sealring.json"
SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)(?P<labels>\{(?:[a-z_]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)*\})? '
    r"(?P<value>[0-9.e+-]+)"
)


def worker(rank: int = 0, *, name: str = "dp") -> WorkerStatus:
    group = GroupStatus(
        id="00ff", name=name, rank=rank, size=2, state="failed", age_s=7.5, sealed_bytes=10,
        opened_bytes=20, gpu_wire=None, peers=[PeerStatus(1 - rank, "host-b", "tcp", 12.5)],
        last_error=ErrorStatus("group.peer_lost: rank 3", 1.0),
    )  # fmt: skip
    counts = [
        Count("sealed_bytes", name, "", float(2**53 - 1)),
        Count("opened_bytes", name, "", 20.0),
        Count("rekeys", name, "", 3.0),
        Count("wait_seconds", name, str(1 - rank), 1.25),
        Count("collectives", name, "all_reduce", 5.0),
        Count("messages", name, "send", 2.0),
        Count("errors", name, "group.peer_lost", 1.0),
    ]
    return WorkerStatus(
        job="train", rank=rank, size=2, host="host-a", pid=100 + rank, version="0.1.0",
        time_s=time.time(), monotonic_ns=1, identity="secret" if rank else "broker",
        certificate_ends_s=time.time() + 7200, sealed_only=True, groups_open=1, groups=[group],
        counts=counts,
    )  # fmt: skip


def samples(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the samples by name. Every line must follow OpenMetrics 1.0."""
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    found: dict[str, list[tuple[str, str]]] = {}
    for line in lines[:-1]:
        if not line.startswith(("# TYPE ", "# UNIT ", "# HELP ")):
            match = SAMPLE.fullmatch(line)
            assert match, line
            found.setdefault(match["name"], []).append((match["labels"] or "", match["value"]))
    return found


def test_every_family_has_samples_of_every_worker() -> None:
    found = samples(as_text([worker(0), worker(1)], silent=1))
    suffix = {"counter": "_total", "gauge": "", "info": "_info"}
    for metric in METRICS:
        name = f"sealring_{metric.plain_name}{suffix[metric.kind]}"
        assert len(found[name]) == 2, name
    assert found[SILENT] == [("", "1")]
    whole = '{job_name="train",rank="0",host="host-a",pid="100",group="dp"}'
    assert found["sealring_sealed_bytes_total"][0] == (whole, str(2**53 - 1))


def test_a_name_cannot_end_its_label() -> None:
    found = samples(as_text([worker(name='a"} 1\nsealring_errors_total 9\\')]))
    assert len(found["sealring_errors_total"]) == 1


def test_two_processes_of_one_rank_have_series_of_their_own() -> None:
    helper = dataclasses.replace(worker(0), pid=777)
    for name, series in samples(as_text([worker(0), helper])).items():
        labels = [each for each, _ in series]
        assert len(set(labels)) == len(labels), name


def panels(*kinds: str) -> list[dict[str, Any]]:
    """Return the dashboard's panels of these kinds, or all of them."""
    every: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [each for each in every if not kinds or each["type"] in kinds]


def variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return found


def queries() -> list[str]:
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(asked) > 10
    return asked + [each["query"]["query"] for each in variables() if each["type"] == "query"]


def test_the_dashboard_asks_only_for_metrics_that_there_are() -> None:
    found = samples(as_text([worker()], silent=1))
    labels = {name for each in found.values() for label, _ in each
              for name in re.findall(r'([a-z_]+)="', label)}  # fmt: skip
    used: set[str] = set()
    for query in queries():
        names = set(re.findall(r"\bsealring_\w+", query))
        assert names, query
        assert names <= found.keys(), query
        used |= names
        selected = re.findall(r'([a-z_]+)(?:=~|!=|=)"', query)
        selected += re.findall(r"(?:by|on|group_left) \(([\w, ]*)\)", query)
        for label in ", ".join(selected).split(", "):
            assert label in labels | {""}, query
    assert used == found.keys(), "a metric that no panel shows"


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_dashboard_uses_only_variables_that_it_has() -> None:
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text()))
    of_grafana = {"__all", "__rate_interval"}
    assert used - of_grafana == {each["name"] for each in variables()}


def test_a_stat_shows_the_present_in_its_own_colours() -> None:
    """A range would show a value after its job has ended. Without thresholds, 80 and up is red."""
    for panel in panels("stat"):
        assert all(each["instant"] and not each["range"] for each in panel["targets"])
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]


def test_a_stat_without_data_is_grey() -> None:
    """Grafana would use the first threshold's colour, which is green for most."""
    for panel in panels("stat"):
        if panel["options"]["colorMode"] != "none":
            mappings = panel["fieldConfig"]["defaults"]["mappings"]
            absent = [each["options"] for each in mappings if each["type"] == "special"]
            assert [each["match"] for each in absent] == ["null+nan"], panel["title"]
            assert absent[0]["result"]["color"].startswith("#6e"), panel["title"]


def test_units_are_grafanas_and_a_tables_are_of_one_column() -> None:
    """A unit set for a whole table also appears after ranks and after groups' numeric names."""
    known = {"none", "s", "binBps", "ops", "percentunit"}  # ids in @grafana/data
    for panel in panels():
        config = panel["fieldConfig"]
        rules = [rule for each in config["overrides"] for rule in each["properties"]]
        units = [each["value"] for each in rules if each["id"] == "unit"]
        if panel["type"] == "table":
            assert "unit" not in config["defaults"], panel["title"]
        else:
            units.append(config["defaults"]["unit"])
        assert set(units) <= known, panel["title"]


@contextmanager
def served(text: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    exporter = Exporter(("127.0.0.1", 0), text.encode, tls)
    thread = threading.Thread(target=exporter.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{exporter.server_address[1]}"
    finally:
        exporter.shutdown()
        exporter.server_close()
        thread.join()


def test_metrics_over_http() -> None:
    text = as_text([worker()])
    with served(text) as address:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert answer.read().decode() == text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/", timeout=10)


def test_connections_beyond_the_bound_are_closed_and_a_later_one_is_served() -> None:
    with served("# EOF\n") as address:
        host, _, port = address.partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS)]
        with socket.create_connection((host, int(port)), timeout=10) as refused:
            assert refused.recv(1) == b""
        for sock in silent:
            sock.close()
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                    assert answer.read() == b"# EOF\n"
                    return
            except OSError:
                time.sleep(0.05)
        pytest.fail("no connection was served after the silent ones had ended")


@pytest.mark.threat("K12")
def test_over_tls_only_clients_with_a_certificate_are_served(tmp_path: Path) -> None:
    (tmp_path / "stranger").mkdir()
    files, stranger = Files(tmp_path), Files(tmp_path / "stranger")
    certificate, key = files.issue("metrics")
    key.chmod(0o600)
    with served("# EOF\n", server_tls(certificate, key, files.ca)) as address:

        def fetch(*proof: Path) -> bytes:
            context = ssl.create_default_context(cafile=files.ca)
            if proof:
                context.load_cert_chain(proof[0], proof[1])
            url = f"https://{address}/metrics"
            with urllib.request.urlopen(url, timeout=10, context=context) as answer:
                content: bytes = answer.read()
                return content

        assert fetch(*files.issue("prometheus")) == b"# EOF\n"
        for proof in ((), stranger.issue("prometheus")):
            with pytest.raises(OSError, match=r"certificate|EOF|closed|reset|alert"):
                fetch(*proof)
        assert fetch(*files.issue("prometheus")) == b"# EOF\n"


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path)
    certificate, key = files.issue("metrics")
    key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        server_tls(certificate, key, files.ca)


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7", "::"])
@pytest.mark.threat("K12")
def test_without_tls_only_this_machine_is_served(address: str) -> None:
    with pytest.raises(ConfigurationError, match="only over TLS"):
        Exporter((address, 0), bytes, None)


@pytest.mark.parametrize("text", ["localhost:80", "127.0.0.1", "127.0.0.1:70000", ":80", "a:b"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:0") == ("::1", 0)


def test_without_listen_the_text_is_printed_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["top", "metrics"], env={"SEALRING_LIVE": str(tmp_path / "none")}
    )
    assert samples(done.stdout) == {SILENT: [("", "0")]}


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus: make system-deps"
)


@needs_prometheus
def test_prometheus_reads_the_text_and_answers_the_dashboards_queries(tmp_path: Path) -> None:
    with served(as_text([worker(0), worker(1)], silent=1)) as address:
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            f"- {{job_name: sealring, static_configs: [{{targets: ['{address}']}}]}}\n"
        )
        own = f"127.0.0.1:{free_port()}"
        with subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address={own}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as prometheus:  # fmt: skip
            try:
                _wait_for(lambda: _answers(own, "sum(up)") == ["1"])
                for query in queries():
                    if not query.startswith("label_values"):
                        plain = _filled(query)
                        _wait_for(lambda plain=plain: bool(_answers(own, plain)), plain)
                shown = {
                    panel["title"]: _answers(own, _filled(panel["targets"][0]["expr"]))
                    for panel in panels("stat")
                }
                # increase() alone would miss the first error, with which a series begins.
                assert shown["Errors, 1 hour"] == ["2"]
                assert shown["Failed groups"] == ["1"]  # one group of two ranks
                assert shown["Sealed only"] == shown["Ranks missing"] == ["0"]
                assert shown["Ranks up"] == ["2"]
                assert shown["Silent workers"] == ["1"]
            finally:
                prometheus.terminate()


def _filled(query: str) -> str:
    return re.sub(r"\$(job|rank)", ".*", query.replace("$__rate_interval", "10s"))


def _answers(server: str, query: str) -> list[str]:
    url = f"http://{server}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as problem:
        if problem.code == 503:  # it is still starting
            return []
        raise
    except OSError:
        return []
    assert found["status"] == "success", query
    return [each["value"][1] for each in found["data"]["result"]]


def _wait_for(met: Any, what: str = "") -> None:
    for _ in range(400):
        if met():
            return
        time.sleep(0.1)
    pytest.fail(f"no answer: {what}")
