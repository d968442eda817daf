"""`sealring doctor`: what this machine has, what it lacks, and how to mend it."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.table import Table

from sealring import limits
from sealring.bench.floor import aes_rate
from sealring.cli.openssl import age_of_list, libraries, what_is_wrong
from sealring.cli.terminal import console, print_json
from sealring.cli.variables import unknown_variables
from sealring.errors import ConfigurationError, SealringError
from sealring.version import untested_torch

if TYPE_CHECKING:
    import torch

Verdict = Literal["ok", "warning", "problem"]
SLOW_AEAD: Final = 0.5e9
"""Bytes a second below which AES surely is not done by instructions of its own."""
WIDE_AES: Final = {"vaes", "vpclmulqdq", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
"""What OpenSSL asks of an x86-64 CPU before it computes four blocks of AES in one instruction."""
FIRST_WITH_WIDE_AES: Final = 0x30100000
FIRST_WITH_KEY_EXCHANGE: Final = 0x30500000
HOW_TO_UPDATE: Final = {
    "records": "update the system's OpenSSL, or, where one is built into sealring, run `make "
    "libcrypto` and install sealring again",
    "handshake": "pip install --upgrade cryptography pyOpenSSL",
    "Python": "update Python, or the system's OpenSSL; sealring's links do not use this one",
}
BUILT: Final = 1_790_000_000
"""A moment before this release: a clock that shows less is wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    watch: Annotated[
        int | None,
        typer.Option(
            "--watch",
            metavar="PID",
            min=1,
            help="Instead: list the sockets and groups of this process and of those that it "
            "started, and which are sealed; exit status 1 if one is not, or cannot be told.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="With --watch: where the workers' sockets are.")
    ] = None,
) -> None:
    """Check that this machine can run sealed training; exit status 1 if it cannot."""
    if watch is not None:
        from sealring.cli.watch import watch as watch_process

        watch_process(watch, as_json=json, directory=directory)
        return
    if directory is not None:
        raise ConfigurationError("--directory is for --watch PID, which is not given")
    findings = [finding for check in CHECKS for finding in check()]
    healthy = all(finding.verdict != "problem" for finding in findings)
    if json:
        print_json({"healthy": healthy, "checks": [asdict(finding) for finding in findings]})
    else:
        console.print(_table(findings))
        for finding in findings:
            if finding.fix:  # as wide as the terminal: it is read, and parts of it are copied
                console.print(f"{finding.check}: {finding.fix}", markup=False, highlight=False)
    if not healthy:
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table(title="sealring doctor")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        table.add_row(finding.check, marks[finding.verdict], finding.found)
    return table


def _cpu_words() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())


def _aes() -> Iterator[Finding]:
    words = _cpu_words()
    multiply = "pmull" if platform.machine() == "aarch64" else "pclmulqdq"
    missing = [name for name in ("aes", multiply) if name not in words]
    rate = aes_rate()
    found = f"{rate / 1e9:.1f} GB/s of {limits.SUITE} on one core"
    if missing or rate < SLOW_AEAD:
        yield Finding(
            "AES instructions",
            "warning",
            f"{found}; the CPU lacks {', '.join(missing) or 'speed'}",
            "sealing works but is slow; pass the host's CPU flags on to the virtual machine",
        )
    else:
        yield Finding("AES instructions", "ok", found)


def openssl_speed(number: int, cpu: set[str]) -> Finding | None:
    """A warning where the OpenSSL that seals leaves the CPU's fastest instructions unused."""
    if number < FIRST_WITH_WIDE_AES and cpu >= WIDE_AES:
        return Finding(
            "OpenSSL, speed",
            "warning",
            "the one for records does not use this CPU's VAES instructions",
            "sealing is faster with OpenSSL 3.1 or later: update the system's, or build one in "
            "(docs/configuration.md, SEALRING_STATIC_OPENSSL)",
        )
    return None


def _openssl() -> Iterator[Finding]:
    for library in libraries():
        name, wrong = f"OpenSSL, {library.use}", what_is_wrong(library)
        if library.use == "records" and (slow := openssl_speed(library.number, _cpu_words())):
            yield slow
        if library.use == "handshake" and library.number < FIRST_WITH_KEY_EXCHANGE:
            wrong = f"has no {limits.KEY_EXCHANGE}"
            yield Finding(name, "problem", f"{library.text} {wrong}", HOW_TO_UPDATE[library.use])
        elif wrong is not None:
            yield Finding(name, "warning", f"{library.text}: {wrong}", HOW_TO_UPDATE[library.use])
        else:
            yield Finding(name, "ok", library.text)
    if (old := age_of_list()) is not None:
        yield Finding(
            "OpenSSL, list", "warning", old, "newer fixes are not known here: update sealring"
        )


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def _torch() -> Iterator[Finding]:
    if not _has_torch():
        fix = "workers need it: pip install torch. A broker does not"
        yield Finding("torch", "problem", "not installed", fix)
        return
    import torch
    import torch.distributed as dist

    untested = untested_torch(torch.__version__)
    yield Finding("torch", "warning" if untested else "ok", torch.__version__, untested)
    if "sealring" in dist.Backend.backend_list:
        yield Finding("backend", "ok", '"sealring" is known to torch.distributed')
    else:
        yield Finding(
            "backend",
            "problem",
            "torch does not know the backend",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or reinstall: pip install --force-reinstall "
            "sealring",
        )


def _variables() -> Iterator[Finding]:
    for sentence in unknown_variables(os.environ):
        yield Finding("settings", "warning", "a variable that sealring does not read", sentence)


def _identity() -> Iterator[Finding]:
    from sealring.errors import NoIdentity
    from sealring.identity import load_credentials

    if broker := os.environ.get("SEALRING_BROKER"):
        yield _brokered(broker)
        return
    try:
        rank = _number("RANK", 0)
        credentials = load_credentials(rank, _number("WORLD_SIZE", rank + 1))
    except NoIdentity as error:
        yield Finding("identity", "warning", "none configured in this shell", str(error))
    except SealringError as error:
        yield Finding("identity", "problem", type(error).__name__, str(error))
    else:
        until = credentials.certificate.not_valid_after_utc
        yield Finding(
            "identity", "ok", f"job {credentials.job}, rank {rank}, until {until:%Y-%m-%d %H:%M}Z"
        )


def _number(variable: str, default: int) -> int:
    """Of torchrun's variables, which a shell may have from elsewhere."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"{variable} is {text!r}, which is not a number: unset it")
    return int(text)


def _brokered(broker: str) -> Finding:
    """Only what is set: asking the broker itself would take a rank."""
    try:
        from sealring.broker.enrolment import read_settings

        settings = read_settings(os.environ)
    except SealringError as error:
        return Finding("identity", "problem", type(error).__name__, str(error))
    kinds = ", ".join(
        "SIMULATED" if kind == "simulated" else kind for kind in sorted(settings.policy.kinds)
    )
    return Finding("identity", "ok", f"job {settings.job}, from {broker}; peers must be {kinds}")


def _ports() -> Iterator[Finding]:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        name = f"ports, {'IPv4' if family == socket.AF_INET else 'IPv6'}"
        try:
            with socket.create_server((address, 0), family=family) as server:
                server.settimeout(2)
                with socket.create_connection(server.getsockname()[:2], timeout=2):
                    server.accept()[0].close()
        except OSError as error:
            verdict: Verdict = "problem" if family == socket.AF_INET else "warning"
            yield Finding(name, verdict, str(error), "allow TCP on the loopback interface")
        else:
            yield Finding(name, "ok", f"can listen and connect on {address}")
    yield _listening_address()


def _listening_address() -> Finding:
    from sealring.links.addresses import own_addresses

    try:
        return Finding("interface", "ok", f"would listen on {', '.join(own_addresses(os.environ))}")
    except SealringError as error:
        return Finding("interface", "problem", type(error).__name__, str(error))


def _shared_memory() -> Iterator[Finding]:
    from sealring.links.descriptors import leave
    from sealring.links.memory import create_memory

    try:
        memory = create_memory()
        try:
            leave(memory.inbox.address, [memory.fd])
            memory.take_peers()
        finally:
            memory.close()
    except SealringError as error:
        yield Finding(
            "shared memory",
            "warning",
            str(error),
            "ranks of one host will use TCP, which is slower; allow memfd_create and Unix sockets",
        )
    else:
        yield Finding("shared memory", "ok", "sealed memory files can be made and shared")


class _Timex(ctypes.Structure):
    # Only the size and the first two fields matter: with modes 0 the call changes nothing.
    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 252))


def _clock() -> Iterator[Finding]:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    if now < BUILT:
        yield Finding("clock", "problem", f"{shown} is before this release", "set the clock (NTP)")
        return
    # adjtimex returns 5 (TIME_ERROR) while nothing keeps the clock right.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    if state == 5:
        yield Finding(
            "clock",
            "warning",
            f"{shown}, not synchronised",
            "run an NTP client: certificates live for hours, and a wrong clock refuses them",
        )
    else:
        yield Finding("clock", "ok", f"{shown}, synchronised")


def _gpus() -> Iterator[Finding]:
    if not _has_torch():
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "ok", "none that torch can use here: tensors on the CPU are sealed")
        return
    for ordinal in range(torch.cuda.device_count()):
        yield _gpu(torch.device("cuda", ordinal))


def _gpu(device: torch.device) -> Finding:
    """A group of one, made ready for the GPU as every group is."""
    import torch

    from sealring import _native
    from sealring.engine.engine import CollectiveEngine
    from sealring.group.gpu import GpuCalls
    from sealring.group.settings import read_settings

    name = f"GPU, {device}"
    try:
        wait = read_settings(os.environ).cuda_wait
        engine = CollectiveEngine(
            0,
            1,
            context=bytes(limits.KEY_BYTES),
            group_key=_native.Secret.random(limits.KEY_BYTES),
            links=(),
        )
        calls = GpuCalls(engine, wait)
        calls.attach(device)
    except SealringError as error:
        return Finding(name, "problem", type(error).__name__, str(error))
    who = "stream" if calls.streams_wait else "host"
    found = f"{torch.cuda.get_device_name(device)}: kernels compiled, the {who} waits for results"
    return Finding(name, "ok", found)


def _key_memory() -> Iterator[Finding]:
    from sealring import _native

    kept = _native.Secret.random(limits.KEY_BYTES)
    mapped, locked = _native.secret_memory_report()
    del kept
    if locked == mapped:
        yield Finding("memory for keys", "ok", "locked into RAM, left out of core files")
        return
    yield Finding(
        "memory for keys",
        "warning",
        "left out of core files, not locked into RAM",
        "keys could reach a swap file: raise `ulimit -l` (RLIMIT_MEMLOCK), or use no swap",
    )


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _aes,
    _openssl,
    _torch,
    _variables,
    _identity,
    _ports,
    _shared_memory,
    _clock,
    _key_memory,
    _gpus,
)
