"""Workers' answers as OpenMetrics text, which Prometheus and OpenTelemetry's collector read.

A process of its own serves it over HTTP, so that a worker needs no port. Every request asks the
workers anew. Connections are bounded in number and time. Except on loopback, only TLS is spoken,
and clients must show a certificate.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from sealring.core.identity.process import read_private
from sealring.errors import ConfigurationError
from sealring.observe.metrics import COUNTERS, Metric
from sealring.observe.status import GroupStatus, WorkerStatus
from sealring.version import __version__

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[dict[str, str], float]
_SUFFIX: Final = {"counter": "_total", "info": "_info"}


def _of_open_groups(
    value: Callable[[GroupStatus], Sample],
) -> Callable[[WorkerStatus], Iterator[Sample]]:
    """Reads open groups. Of several groups with the same name, only the newest."""

    def read(worker: WorkerStatus) -> Iterator[Sample]:
        newest: dict[str, GroupStatus] = {}
        for each in sorted(worker.groups, key=lambda group: group.age_s):
            if each.state != "closed":
                newest.setdefault(each.name, each)
        for name, each in newest.items():
            labels, number = value(each)
            yield {"group": name, **labels}, number

    return read


def _build(worker: WorkerStatus) -> Iterator[Sample]:
    yield (
        {
            "version": worker.version,
            "identity": worker.identity,
            "sealed_only": "1" if worker.sealed_only else "0",
        },
        1,
    )


GAUGES: Final[tuple[Metric[WorkerStatus], ...]] = (
    Metric("job_ranks", "", "How many ranks the job has.",
           lambda worker: [({}, worker.size)], kind="gauge"),
    Metric("groups", "", "Sealed groups that have not ended.",
           lambda worker: [({}, worker.groups_open)], kind="gauge"),
    Metric("group_age", "s", "How long ago the group was made.",
           _of_open_groups(lambda group: ({}, group.age_s)), kind="gauge"),
    Metric("group_failed", "", "1 if a call of the group ended in an error.",
           _of_open_groups(lambda group: ({}, group.state == "failed")), kind="gauge"),
    Metric("group_gpu", "", "Which way records take between GPUs.",
           _of_open_groups(lambda group: ({"wire": group.gpu_wire or "none"}, 1)), kind="info"),
    Metric("certificate_end", "s", "When the worker's certificate ends, in seconds since 1970.",
           lambda worker: [({}, worker.certificate_ends_s)], kind="gauge"),
    Metric("worker", "", "Version and identity of a worker.", _build, kind="info"),
)  # fmt: skip
METRICS: Final[Sequence[Metric[Any]]] = [*COUNTERS, *GAUGES]
SILENT: Final = "sealring_silent_workers"


def as_text(workers: Sequence[WorkerStatus], silent: int = 0) -> str:
    """The OpenMetrics text. `silent`: the number of sockets whose worker gave no answer."""
    lines: list[str] = []
    for metric in METRICS:
        name = f"sealring_{metric.plain_name}"
        lines.append(f"# TYPE {name} {metric.kind}")
        if metric.plain_name != metric.name:
            lines.append(f"# UNIT {name} {metric.plain_name.removeprefix(f'{metric.name}_')}")
        lines.append(f"# HELP {name} {metric.text}")
        for worker in workers:
            for labels, value in _samples(metric, worker):
                named = _labels({**_labels_of(worker), **labels})
                lines.append(f"{name}{_SUFFIX.get(metric.kind, '')}{named} {_number(value)}")
    lines += [
        f"# TYPE {SILENT} gauge",
        f"# HELP {SILENT} Workers of this machine whose socket is there and gives no answer.",
        f"{SILENT} {silent}",
        "# EOF\n",
    ]
    return "\n".join(lines)


def _samples(metric: Metric[Any], worker: WorkerStatus) -> Iterator[Sample]:
    """The samples of a metric. A worker's answer has its counters already."""
    if metric.kind != "counter":
        yield from metric.read(worker)
        return
    label = metric.attribute.rpartition(".")[2]
    for each in worker.counts:
        if each.metric == metric.plain_name:
            yield {"group": each.group, **({label: each.label} if label else {})}, each.value


def _labels_of(worker: WorkerStatus) -> dict[str, str]:
    # Not "job", which Prometheus uses for what it scrapes. With the process id, because a rank may
    # have helpers with groups of their own, such as the process of torch that saves checkpoints.
    return {
        "job_name": worker.job,
        "rank": str(worker.rank),
        "host": worker.host,
        "pid": str(worker.pid),
    }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """A number as text. Whole numbers are written in full: a counter of bytes needs all digits."""
    return str(int(value)) if value == int(value) else repr(float(value))


# ---- the text over HTTP

MOST_CONNECTIONS: Final = 16
SECONDS: Final = 10.0
"""The time limit for a whole connection."""


class Exporter(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], answer: Callable[[], bytes], tls: ssl.SSLContext | None
    ) -> None:
        ip = _ip(address[0])
        if not ip.is_loopback and tls is None:
            raise ConfigurationError(
                f"{address[0]} can be reached from other machines: metrics are served there only "
                "over TLS. Pass --certificate, --key and --authority, or listen on 127.0.0.1"
            )
        self.address_family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        self.answer = answer
        self._tls = tls
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__(address, _Handler)
        except OSError as problem:
            raise ConfigurationError(
                f"metrics cannot be served on {address[0]}:{address[1]}: {problem.strerror}"
            ) from problem

    def verify_request(self, request: Any, client_address: Any) -> bool:
        # Over the limit, a connection is closed at once. The scraper will try again.
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A socket's own timeout does not stop a peer that sends a byte now and then. A second
        # descriptor is needed, because TLS takes over the first.
        with request.dup() as same:
            limit = threading.Timer(SECONDS, _shut, (same,))
            limit.daemon = True
            limit.start()
            try:
                super().process_request_thread(self._secured(request), client_address)
            except OSError:  # TLS errors too: the peer has no certificate, or speaks no TLS
                self.shutdown_request(request)
            finally:
                limit.cancel()
                self._free.release()

    def _secured(self, request: socket.socket) -> socket.socket:
        request.settimeout(SECONDS)
        return request if self._tls is None else self._tls.wrap_socket(request, server_side=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a peer that goes away or speaks no HTTP."""


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Handler(BaseHTTPRequestHandler):
    server: Exporter
    server_version = f"sealring/{__version__}"
    sys_version = ""
    timeout = SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "metrics are at /metrics")
            return
        content = self.server.answer()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because a scrape comes every few seconds."""


def parse_address(text: str) -> tuple[str, int]:
    """Parses 127.0.0.1:9464 or [::1]:9464. Takes an IP address, never a name."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is no address: pass IP:PORT, as in 127.0.0.1:9464")
    _ip(host)
    return host, int(port)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise ConfigurationError(
            f"{text!r} is no IP address: pass one, as in 127.0.0.1:9464 or [::1]:9464"
        ) from None


def server_tls(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """TLS 1.3 for clients whose certificate `authority` signed."""
    read_private(key, "the key", ConfigurationError)  # refused if other users can read it
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as problem:
        raise ConfigurationError(
            f"{certificate}, {key} or {authority} cannot be used: {problem}"
        ) from problem
    return context
