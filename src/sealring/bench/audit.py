"""What an audit costs: checking records, writing the page, opening it in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from sealring.audit.audit import audit
from sealring.audit.page import write_page
from sealring.audit.result import Status
from sealring.audit.trust import AuditTrust
from sealring.bench.made_run import Authority, HonestRun, write_statements
from sealring.errors import WorkerFailed
from sealring.formats.log.folder import LogWriter, create_log
from sealring.formats.log.notes import Kind, Signer
from sealring.formats.log.policy import Log, LogPolicy

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE_SECONDS: Final = 120
_OPENED: Final = re.compile(r'<html[^>]* data-opened="(\d+)"')
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AuditCost:
    ranks: int
    intervals: int
    statements: int
    statement_bytes: int
    """On average."""
    seconds: float
    """The whole audit: log, signatures, contradictions, graph."""
    cpu_seconds: float
    """The same without the time that other processes took."""
    page_seconds: float
    page_bytes: int
    opened_ms: float | None
    """From the start of navigation until the page was laid out and its script had run; None: there
    is no browser here."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_audit(ranks: int, intervals: int, folder: Path | None = None) -> AuditCost:
    """An honest run of that size, in a temporary folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="sealring-audit-", dir=folder) as made:
        return _measure(Path(made), ranks, intervals)


def _measure(folder: Path, ranks: int, intervals: int) -> AuditCost:
    authority = Authority()
    signer = Signer.generate("bench.sealring/run", Kind.NOTE)
    run, entries = write_statements(
        folder / "run", HonestRun(authority, ranks, intervals).envelopes()
    )
    create_log(run.log, signer)
    with LogWriter(run.log, signer) as writer:
        writer.append(entries)
    trust = AuditTrust([authority.certificate], LogPolicy((Log(signer.verifier),)))
    before = time.process_time()
    seconds, result = _timed(lambda: audit(run.path, trust))
    cpu = time.process_time() - before
    if result.status is not Status.SHOWN:
        raise WorkerFailed(f"the audit of an honest run found: {result.findings[:1]}")
    page = folder / "page.html"
    written, _ = _timed(lambda: write_page(page, result))
    return AuditCost(
        ranks=ranks,
        intervals=intervals,
        statements=len(entries),
        statement_bytes=round(sum(map(len, entries)) / len(entries)),
        seconds=round(seconds, 3),
        cpu_seconds=round(cpu, 3),
        page_seconds=round(written, 3),
        page_bytes=page.stat().st_size,
        opened_ms=_opened(page),
    )


def _opened(page: Path) -> float | None:
    """The page tells itself how long it took; the browser's own start does not count."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-extensions", "--disable-background-networking",
                "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    opened = _OPENED.search(done.stdout)
    if opened is None:
        raise WorkerFailed(f"{browser} did not open the page: {done.stderr[-500:]}")
    return float(opened[1])


def _timed(act: Callable[[], T]) -> tuple[float, T]:
    before = time.perf_counter()
    found = act()
    return time.perf_counter() - before, found
