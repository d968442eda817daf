"""`sealring doctor`: what this machine has, what it lacks, and how to fix it."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, get_args

import typer
from rich.text import Text

from sealring import limits
from sealring.cli.openssl import age_of_list, libraries, what_is_wrong
from sealring.cli.options import AsJson
from sealring.cli.peer import MEANING, try_peer
from sealring.cli.terminal import console, print_json, printable, say, table
from sealring.core.settings import ADVERTISE, BROKER, PORTS, TABLE, unknown_variables
from sealring.errors import ConfigurationError, SealringError, named
from sealring.lab.bench.harness import aes_rate
from sealring.observe.watch import ALARMS, WatchedProcess, watch
from sealring.version import untested_torch

if TYPE_CHECKING:
    import torch

GIB: Final = 1 << 30
SLOW_AEAD: Final = 0.5e9
"""Bytes per second. A lower rate shows that the CPU's AES instructions are not used."""
WIDE_AES: Final = {"vaes", "vpclmulqdq", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
"""The CPU flags that OpenSSL needs to compute four AES blocks in one x86-64 instruction."""
FIRST_WITH_WIDE_AES: Final = 0x30100000
FIRST_WITH_KEY_EXCHANGE: Final = 0x30500000
HOW_TO_UPDATE: Final = {
    "records": "update the system's OpenSSL, or, where one is built into sealring, run `make "
    "libcrypto` and install sealring again",
    "handshake": "pip install --upgrade cryptography pyOpenSSL",
    "Python": "update Python, or the system's OpenSSL; sealring's links do not use this one",
}
BUILT: Final = 1_790_000_000
"""A time before this release. A clock that shows an earlier time is wrong."""


STYLES: Final = {
    "ok": "green", "warning": "yellow", "problem": "red",
    "sealed": "green", "not sealed": "bold red", "unknown": "yellow",
    "answers": "green", "refuses": "yellow",
}  # fmt: skip
"""The colours of verdicts on this machine, on a job's sockets and on another machine."""


class CheckResult(NamedTuple):
    check: str
    verdict: Literal["ok", "warning", "problem"]
    found: str
    fix: str = ""


def doctor(
    json: AsJson = False,
    watched: Annotated[
        int | None,
        typer.Option(
            "--watch",
            metavar="PID",
            min=1,
            help="Instead: list the sockets and groups of this process and of those that it "
            "started, and which are sealed; exit status 1 if one is not, or cannot be told.",
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Instead: try to reach this machine and port; exit status 1 if nothing answers "
            "(docs/reach.md).",
        ),
    ] = None,
) -> None:
    """Check that this machine can run sealed training; exit status 1 if it cannot."""
    if peer is not None and watched is not None:
        raise ConfigurationError("--watch and --peer are two questions: leave out one of them")
    if peer is not None:
        fine = _try_peer(peer, json)
    else:
        fine = _watch(watched, json) if watched is not None else _examine(json)
    if not fine:
        raise typer.Exit(1)


def _try_peer(peer: str, as_json: bool) -> bool:
    answers = try_peer(peer)
    reached = any(each.verdict == "answers" for each in answers)
    if as_json:
        told = [{**each._asdict(), "meaning": MEANING[each.verdict]} for each in answers]
        print_json({"reached": reached, "tried": told})
        return reached
    for each in answers:
        line = Text(f"{printable(each.address)} ")
        console.print(line.append(each.verdict, style=STYLES.get(each.verdict, "red")))
        say(f"{each.why}: {MEANING[each.verdict]}.")
    return reached


def _examine(as_json: bool) -> bool:
    findings = list(_findings())
    healthy = all(finding.verdict != "problem" for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "checks": [finding._asdict() for finding in findings]})
        return healthy
    rows = [(each.check, Text(each.verdict, STYLES[each.verdict]), each.found) for each in findings]
    console.print(table(("check", "", "found"), rows, wrap=("found",)))
    for finding in findings:
        if finding.fix:
            say(f"{finding.check}: {finding.fix}")
    return healthy


def _findings() -> Iterator[CheckResult]:
    for name, check in CHECKS.items():
        try:
            yield from check(name)
        except SealringError as error:
            yield CheckResult(name, "problem", named(error), str(error))


def _cpu_words() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())


def _aes(name: str) -> Iterator[CheckResult]:
    words = _cpu_words()
    multiply = "pmull" if platform.machine() == "aarch64" else "pclmulqdq"
    missing = ", ".join(each for each in ("aes", multiply) if each not in words)
    rate = aes_rate()
    found = f"{rate / 1e9:.1f} GB/s of {limits.SUITE} on one core"
    if missing or rate < SLOW_AEAD:
        found += f"; the CPU lacks {missing or 'speed'}"
        fix = "sealing works but is slow; pass the host's CPU flags on to the virtual machine"
        yield CheckResult(name, "warning", found, fix)
    else:
        yield CheckResult(name, "ok", found + slower_without(_cpu_words(), platform.machine()))


def slower_without(cpu: set[str], architecture: str) -> str:
    """What an x86-64 CPU lacks that others seal faster with."""
    return "" if architecture != "x86_64" or cpu >= WIDE_AES else "; this CPU has no VAES"


def _digests(name: str) -> Iterator[CheckResult]:
    from sealring.vault.digests import Hash, faster, rate_of

    rates = {one: rate_of(one) for one in get_args(Hash)}
    costs = " and ".join(f"{one} {1e3 * GIB / rate:.0f} ms" for one, rate in rates.items())
    found = f"1 GiB of a checkpoint costs a core {costs}"
    instructions = "sha2" if platform.machine() == "aarch64" else "sha_ni"
    if instructions in _cpu_words():
        yield CheckResult(name, "ok", found)
        return
    fix = (
        f"checkpoints and sealed files take {faster()} here; datasets, recorded runs and saves in "
        "the background take SHA-256. On a virtual machine, pass the host's CPU flags on"
    )
    yield CheckResult(name, "warning", f"{found}; this CPU has no SHA instructions", fix)


def openssl_speed(number: int, cpu: set[str]) -> CheckResult | None:
    """A warning if the OpenSSL for records does not use the CPU's fastest instructions."""
    if number >= FIRST_WITH_WIDE_AES or not cpu >= WIDE_AES:
        return None
    return CheckResult(
        "OpenSSL, speed",
        "warning",
        "the one for records does not use this CPU's VAES instructions",
        "sealing is faster with OpenSSL 3.1 or later: update the system's, or build one in "
        "(docs/configuration.md, SEALRING_STATIC_OPENSSL)",
    )


def _openssl(name: str) -> Iterator[CheckResult]:
    for library in libraries():
        use, wrong = f"{name}, {library.use}", what_is_wrong(library)
        how = HOW_TO_UPDATE[library.use]
        if library.use == "records" and (slow := openssl_speed(library.number, _cpu_words())):
            yield slow
        if library.use == "handshake" and library.number < FIRST_WITH_KEY_EXCHANGE:
            yield CheckResult(use, "problem", f"{library.text} has no {limits.KEY_EXCHANGE}", how)
        elif wrong is not None:
            yield CheckResult(use, "warning", f"{library.text}: {wrong}", how)
        else:
            yield CheckResult(use, "ok", library.text)
    if (old := age_of_list()) is not None:
        fix = "newer fixes are not known here: update sealring"
        yield CheckResult(f"{name}, list", "warning", old, fix)


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def _torch(name: str) -> Iterator[CheckResult]:
    if not _has_torch():
        fix = "workers need it: pip install torch. A broker does not"
        yield CheckResult(name, "problem", "not installed", fix)
        return
    import torch
    import torch.distributed as dist

    untested = untested_torch(torch.__version__)
    yield CheckResult(name, "warning" if untested else "ok", torch.__version__, untested)
    if "sealring" in dist.Backend.backend_list:
        yield CheckResult("backend", "ok", '"sealring" is known to torch.distributed')
    else:
        fix = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or reinstall: pip install --force-reinstall "
        yield CheckResult("backend", "problem", "torch does not know the backend", f"{fix}sealring")


def _variables(name: str) -> Iterator[CheckResult]:
    given = []
    for row in TABLE.values():
        if row.read(os.environ) != row.default:  # a wrong value raises, and says what to set
            given.append(row.where)
    yield CheckResult(name, "ok", ", ".join(given) or "all at their defaults")
    for sentence in unknown_variables(os.environ):
        yield CheckResult(name, "warning", "a variable that sealring does not read", sentence)


def _identity(name: str) -> Iterator[CheckResult]:
    if broker := BROKER.read(os.environ):
        # Only the settings are checked: asking the broker would occupy a rank.
        from sealring.attest.broker.enrolment import read_settings

        settings = read_settings(os.environ)
        kinds = ", ".join(
            "SIMULATED" if kind == "simulated" else kind for kind in sorted(settings.policy.kinds)
        )
        yield CheckResult(name, "ok", f"job {settings.job}, from {broker}; peers must be {kinds}")
        return
    from sealring.core.identity import load_credentials

    try:
        rank = _number("RANK", 0)
        credentials = load_credentials(rank, _number("WORLD_SIZE", rank + 1))
    except ConfigurationError as error:
        if error.code != "configuration.no_identity":
            raise
        yield CheckResult(name, "warning", "none configured in this shell", str(error))
        return
    until = credentials.certificate.not_valid_after_utc
    yield CheckResult(
        name, "ok", f"job {credentials.job}, rank {rank}, until {until:%Y-%m-%d %H:%M}Z"
    )


def _number(variable: str, default: int) -> int:
    """The number in one of torchrun's variables, which may be set in this shell."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"{variable} is {text!r}, which is not a number: unset it")
    return int(text)


def _ports(name: str) -> Iterator[CheckResult]:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        ipv4 = family == socket.AF_INET
        what = f"{name}, {'IPv4' if ipv4 else 'IPv6'}"
        try:
            with socket.create_server((address, 0), family=family) as server:
                server.settimeout(2)
                with socket.create_connection(server.getsockname()[:2], timeout=2):
                    server.accept()[0].close()
        except OSError as error:
            fix = "allow TCP on the loopback interface"
            yield CheckResult(what, "problem" if ipv4 else "warning", str(error), fix)
        else:
            yield CheckResult(what, "ok", f"can listen and connect on {address}")


def _interface(name: str) -> Iterator[CheckResult]:
    from sealring.core.links.addresses import read_reach
    from sealring.core.links.listener import listen_at

    reach = read_reach(os.environ)
    ports = PORTS.read(os.environ)
    found = f"would listen on {', '.join(reach.hosts)}, " + (
        f"ports {ports} ({len(reach.ports)})" if ports else "ports that the system chooses"
    )
    if reach.advertised:
        found += f"; others are told {ADVERTISE.read(os.environ)} first"
    for sock in listen_at(reach.hosts, reach.ports):
        sock.close()
    yield CheckResult(name, "ok", found)


def _shared_memory(name: str) -> Iterator[CheckResult]:
    from sealring.core.links.descriptors import leave
    from sealring.core.links.memory import create_memory

    try:
        memory = create_memory()
        try:
            leave(memory.inbox.address, [memory.fd])
            memory.take_peers()
        finally:
            memory.close()
    except SealringError as error:
        fix = "ranks of one host will use TCP, which is slower; allow memfd_create and Unix sockets"
        yield CheckResult(name, "warning", str(error), fix)
    else:
        yield CheckResult(name, "ok", "sealed memory files can be made and shared")


class _Timex(ctypes.Structure):
    # Only the size and `modes` matter: with modes 0 the call changes nothing.
    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 252))


def _clock(name: str) -> Iterator[CheckResult]:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    if now < BUILT:
        yield CheckResult(name, "problem", f"{shown} is before this release", "set the clock (NTP)")
        return
    # adjtimex returns 5 (TIME_ERROR) while the clock is not synchronized.
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex())) == 5:
        fix = "run an NTP client: certificates live for hours, and a wrong clock refuses them"
        yield CheckResult(name, "warning", f"{shown}, not synchronised", fix)
    else:
        yield CheckResult(name, "ok", f"{shown}, synchronised")


def _gpus(name: str) -> Iterator[CheckResult]:
    if not _has_torch():
        return
    import torch

    if not torch.cuda.is_available():
        yield CheckResult(name, "ok", "none that torch can use here: tensors on the CPU are sealed")
        return
    for ordinal in range(torch.cuda.device_count()):
        device = torch.device("cuda", ordinal)
        try:
            yield CheckResult(f"{name}, {device}", "ok", _gpu(device))
        except SealringError as error:
            yield CheckResult(f"{name}, {device}", "problem", named(error), str(error))


def _gpu(device: torch.device) -> str:
    """Prepares a group of one rank for the GPU, as is done for every group."""
    import torch

    from sealring import _native
    from sealring.core.engine.engine import CollectiveEngine
    from sealring.core.engine.gpu_calls import GpuCalls
    from sealring.core.group.settings import read_settings

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
    who = "stream" if calls.streams_wait else "host"
    return f"{torch.cuda.get_device_name(device)}: kernels compiled, the {who} waits for results"


def _key_memory(name: str) -> Iterator[CheckResult]:
    from sealring import _native

    kept = _native.Secret.random(limits.KEY_BYTES)
    mapped, locked = _native.secret_memory_report()
    del kept
    if locked == mapped:
        yield CheckResult(name, "ok", "locked into RAM, left out of core files")
        return
    fix = "keys could reach a swap file: raise `ulimit -l` (RLIMIT_MEMLOCK), or use no swap"
    yield CheckResult(name, "warning", "left out of core files, not locked into RAM", fix)


CHECKS: Final[dict[str, Callable[[str], Iterator[CheckResult]]]] = {
    "AES instructions": _aes,
    "digests of a vault": _digests,
    "OpenSSL": _openssl,
    "torch": _torch,
    "settings": _variables,
    "identity": _identity,
    "ports": _ports,
    "interface": _interface,
    "shared memory": _shared_memory,
    "clock": _clock,
    "memory for keys": _key_memory,
    "GPU": _gpus,
}


def _watch(pid: int, as_json: bool) -> bool:
    processes = watch(pid, os.environ)
    clean = not any(_alarms(each) for each in processes)
    if as_json:
        print_json({"sealed": clean, "processes": [asdict(each) for each in processes]})
        return clean
    for each in processes:
        _print(each)
    counts = Counter(one.verdict for process in processes for one in process.sockets)
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    say(f"{len(processes)} processes, sockets: {words or 'none'}.")
    return clean


def _alarms(process: WatchedProcess) -> bool:
    hidden = process.listed_by is None
    plaintext = any(not group.sealed for group in process.groups)
    return hidden or plaintext or any(each.verdict in ALARMS for each in process.sockets)


def _print(process: WatchedProcess) -> None:
    shown = [each for each in process.sockets if each.verdict != "local"]
    local = len(process.sockets) - len(shown)
    who = "a worker" if process.answers else "gives no status"
    head = f"{process.pid} {process.name}: {who}, {len(process.sockets)} sockets"
    if local:
        head += f", {local} of them Unix sockets, which stay on this machine"
    if process.listed_by == "worker":
        head += " (as the worker itself lists them; root can ask the kernel)"
    if process.listed_by is None:
        head = f"{process.pid} {process.name}: its sockets are not known: run this as root"
    console.print(Text(printable(head), style="bold"))
    for group in process.groups:
        verdict = "sealed" if group.sealed else "not sealed"
        line = Text(f"  group {printable(group.name)}, {group.size} ranks, ")
        console.print(
            line.append(f"{printable(group.backend)}: ").append(verdict, style=STYLES[verdict])
        )
    if shown:
        rows = [
            (Text(each.verdict, STYLES.get(each.verdict, "")), each.local,
             each.remote or each.state, each.why)
            for each in sorted(shown, key=lambda one: (one.verdict, one.local, one.remote))
        ]  # fmt: skip
        columns = ("verdict", "from", "to", "what it is")
        console.print(table(columns, rows, wrap=columns[1:]))
