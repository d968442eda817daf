"""The table of all settings: one row for each environment variable and each rare setting.

The string below a row describes it; tools/settings_page.py writes docs/configuration.md from these
strings. `row.read(environ)` returns the value or the default, or raises ConfigurationError, which
says what to set instead. Rare settings have no variable of their own: they are members of the JSON
object in SEALRING_SETTINGS, or in the file that it names.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from sealring import _native, limits
from sealring.errors import ConfigurationError
from sealring.formats.strict import read_object

# ---- how many cores this worker may use


def usable_cores(root: Path = Path("/")) -> int:
    """Returns at least 1. `root` is the directory that contains proc and sys."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *_limits(root)]))


def _limits(root: Path) -> list[int]:
    """The limits, in whole cores, of the control groups that contain this process."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            found += _limit(each)
    return found


def _limit(folder: Path) -> list[int]:
    """A control group's limit; [] if there is none.

    Version 2 has one file with "max 100000" or "200000 100000", version 1 has two files.
    """
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return []
    return [max(1, int(quota) // int(period))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


T = TypeVar("T")
Transport = Literal["auto", "tcp", "shm"]
GpuWire = Literal["auto", "links", "host", "peer", "nccl"]
CudaWait = Literal["auto", "stream", "host"]
MAX_BYTES: Final = 1 << 16
"""The most bytes of the file that SEALRING_SETTINGS names."""
_PREFIX: Final = "SEALRING_"
_KUBERNETES: Final = re.compile(r"_(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """An environment variable, or a member of SEALRING_SETTINGS."""

    name: str
    chapter: str
    """The chapter of docs/configuration.md that lists it."""
    default: T
    parse: Callable[[Any], T]
    """Parses a variable's text or a member's value; its ValueError says what the value must be."""
    empty_is_unset: bool = True
    """Whether an empty variable counts as unset."""
    alike: bool = False
    """Whether it must be equal on all ranks of a group, else PeerIncompatible."""

    @property
    def is_variable(self) -> bool:
        return self.name.startswith(_PREFIX)

    def read(self, environ: Mapping[str, str]) -> T:
        if not self.is_variable:
            found: T = _members(environ.get(SETTINGS.name) or "{}").get(self.name, self.default)
            return found
        text = environ.get(self.name)
        if text is None or (not text and self.empty_is_unset):
            return self.default
        return self.parsed(text)

    def parsed(self, value: Any) -> T:
        try:
            return self.parse(value)
        except ValueError as problem:
            raise self.refused(value, str(problem)) from None

    def refused(self, value: object, what_to_do: str) -> ConfigurationError:
        return ConfigurationError(f"{self.where} is {value!r}; {what_to_do}")

    @property
    def where(self) -> str:
        return self.name if self.is_variable else f'"{self.name}" in {SETTINGS.name}'


# ---- parsers of values


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("set it to a text")
    return value


def _one_of(choices: Any) -> Callable[[Any], Any]:
    allowed = get_args(choices)

    def parse(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"set it to one of {', '.join(allowed)}")
        return value

    return parse


def _whole(low: int, high: int, multiple: int = 1) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"it must be a number from {low} to {high}")
        if value % multiple:
            raise ValueError(f"it must be a multiple of {multiple}")
        return value

    return parse


def _threads(value: Any) -> int:
    cores = usable_cores()
    most = min(cores, _native.MAX_LANES)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"it must be a number from 1 to {most}: this worker may use {cores} cores")
    return value


def _yes_or_no(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("set it to true or false")
    return value


def _one(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("set it to 1, or unset it")
    return value == "1"


def _live(value: str) -> str:
    if value != "0" and not os.path.isabs(value):
        raise ValueError(
            "set it to the absolute path of a directory, or to 0 for no live view, or unset it"
        )
    return value


def _trace(value: str) -> tuple[str, str]:
    folder, _, signal = value.partition(":")
    if not folder or (":" in value and signal not in ("USR1", "USR2")):
        raise ValueError("set it to FOLDER, FOLDER:USR1 or FOLDER:USR2")
    return folder, signal


# ---- the table

_IDENTITY: Final = "Identity"
_NETWORK: Final = "Network"
_RUN: Final = "What a run leaves"
_RARE: Final = "Rarely needed"
_MEMBERS: Final = "Members of SEALRING_SETTINGS"
_ABSENT: Final[str | None] = None

SECRET_FILE = Setting("SEALRING_SECRET_FILE", _IDENTITY, _ABSENT, str, empty_is_unset=False)
"""a file of this user with no access for others (0600 or 0400): 32 random bytes as 64 hexadecimal
digits or in base64 (`openssl rand -hex 32`)"""
SECRET = Setting("SEALRING_SECRET", _IDENTITY, _ABSENT, str, empty_is_unset=False)
"""the same text; only one of these two. Other processes of the same user may be able to read it"""
CERTIFICATE = Setting("SEALRING_CERTIFICATE", _IDENTITY, _ABSENT, str, empty_is_unset=False)
"""PEM, exactly one certificate: this worker's. `{rank}` stands for its rank in the job"""
KEY = Setting("SEALRING_KEY", _IDENTITY, _ABSENT, str, empty_is_unset=False)
"""PEM, unencrypted, no access for others. `{rank}` as above"""
AUTHORITY = Setting("SEALRING_AUTHORITY", _IDENTITY, _ABSENT, str, empty_is_unset=False)
"""PEM, one or more authorities; the worker's issuer itself must be among them"""
BROKER = Setting("SEALRING_BROKER", _IDENTITY, _ABSENT, str)
"""`https://HOST:PORT` of the job's broker, several with commas; needs `SEALRING_AUTHORITY`,
`SEALRING_POLICY` and `SEALRING_JOB`, and the extra `sealring[broker]`"""
POLICY = Setting("SEALRING_POLICY", _IDENTITY, _ABSENT, str)
"""with a broker: the policy by which this worker judges its peers, see
[attestation.md](attestation.md)"""
ATTESTER = Setting("SEALRING_ATTESTER", _IDENTITY, "tsm", str)
"""with a broker, what makes the evidence: `tsm` (default: an SNP or TDX guest's kernel), `azure`,
`tpm`, `tpm-ak` (a TPM whose attestation key has a certificate) or `coco` (a confidential
container's agent), each with `:FILE` where the machine does not have the certificates of its chip
or of its TPM's maker (PEM, leaf first); or `simulated:DIR` of `sealring policy new --simulator`"""
JOB = Setting("SEALRING_JOB", _IDENTITY, _ABSENT, str, empty_is_unset=False, alike=True)
"""1 to 63 of `A-Z a-z 0-9 . _ -`. Default: derived from the secret, or what the certificate says.
The same on all ranks"""
ONLY = Setting("SEALRING_ONLY", "Sealed only", False, _one)
"""`1`: every process group of this process and of its children is sealed or refused
([sealed-only.md](sealed-only.md)); `sealring run` sets it"""
ADDRESS = Setting("SEALRING_ADDRESS", _NETWORK, _ABSENT, str)
"""the IP address to listen on, not `0.0.0.0` or `::`; or an interface's name, for its IPv4 and
global IPv6 addresses. Unset: the address from which this machine reaches torch's `MASTER_ADDR`
(127.0.0.1 if unset)"""
PORTS = Setting("SEALRING_PORTS", _NETWORK, _ABSENT, str)
"""the only ports that a worker listens on: ranges and single ports, `29600-29663,29700`. Each group
of each worker takes one. Unset: ports that the system chooses ([reach.md](reach.md))"""
ADVERTISE = Setting("SEALRING_ADVERTISE", _NETWORK, _ABSENT, str)
"""an IP address from which an address translation leads here. Peers are told it before the address
that the worker listens on. With ports (`203.0.113.7:30000-30063`, `[2001:db8::7]:30000-30063`) the
first stands for the first of `SEALRING_PORTS`, and so on; without: the same ports"""
TRANSPORT: Setting[Transport] = Setting("SEALRING_TRANSPORT", _NETWORK, "auto", _one_of(Transport))
"""`auto` (default): shared memory with ranks of the same host, else TCP. `tcp`: TCP only. `shm`:
shared memory, or `Unsupported`. Containers need one network namespace for it (one pod, or
`--network host`)"""
GPU_WIRE: Setting[GpuWire] = Setting(
    "SEALRING_GPU_WIRE", _NETWORK, "auto", _one_of(GpuWire), alike=True
)
"""the way of records between GPUs, the same on all ranks. `auto` (default): `peer`, else `host`, if
all ranks are on one host; else `peer` between ranks of one host, and `links`. `peer`: GPU memory by
CUDA's inter-process handles. `host`: shared memory that both GPUs have registered. `nccl`: NCCL's
sends and receives between hosts, and `peer` between ranks of one host, for clusters with RDMA;
needs `CUDA_MODULE_LOADING=EAGER`, and ports that are the job's alone
([threat-model.md](threat-model.md)). `links`: the transport above. One that is not available is
`Unsupported` on all ranks, with the reason"""
TRACE = Setting("SEALRING_TRACE", _RUN, ("", ""), _trace)
"""a folder: a worker whose collective or message fails writes its flight record into it
([observability.md](observability.md)). With `:USR1` or `:USR2` at its end that signal writes it
too, and the script's own handler runs after"""
LIVE = Setting("SEALRING_LIVE", _RUN, "", _live)
"""the absolute path of a directory for this user alone (0700): each worker has a Unix socket in it,
on which `sealring top` asks what it does ([observability.md](observability.md#live)). Default:
`sealring-UID` in the system's directory for temporary files. `0`: no socket"""
VAULT_LEDGER = Setting("SEALRING_VAULT_LEDGER", _RUN, "", str)
"""`broker`: the job's broker keeps the ledgers of vaults; else a folder for them, which must exist;
unset: each lies in its vault's directory ([vault.md](vault.md#the-brokers-ledger))"""
SETTINGS = Setting("SEALRING_SETTINGS", _RARE, "", str)
"""a JSON object of the settings below, as `{"threads": 4}`; or a file with one, at most 64 KiB: a
regular file of this user or of root that no other user can write to. A process reads it once"""

ALGORITHM = Setting("algorithm", _MEMBERS, "", text, alike=True)
"""`ring`, `direct`, `tree`, `parameter_server` or `hierarchical`, for those operations that have
it; or for some, as `all_reduce=ring,broadcast=tree`. Default: by the table"""
ALGORITHM_TABLE = Setting("algorithm_table", _MEMBERS, "", text, alike=True)
"""a file that `python -m sealring.lab algorithms --table` wrote ([algorithms.md](algorithms.md)),
at most 1 MiB. Default: the shipped table"""
RECORD_BYTES = Setting(
    "record_bytes", _MEMBERS, limits.RECORD_BYTES, _whole(1 << 10, limits.MAX_PAYLOAD_BYTES, 64),
    alike=True,
)  # fmt: skip
"""1024 to 1048576, a multiple of 64. Default: 126976"""
REKEY_BYTES = Setting("rekey_bytes", _MEMBERS, limits.REKEY_BYTES, _whole(1, limits.REKEY_BYTES))
"""1 to 68719476736, which is 64 GiB and the default: after so much a key is replaced"""
THREADS: Setting[int | None] = Setting("threads", _MEMBERS, None, _threads)
"""threads that share a large collective of CPU tensors, 1 to the cores that this worker may use
(its CPU mask and its control groups' limits); the least of all ranks counts. Default: this rank's
part of those cores, 8 at most: they are divided by the ranks on this host, or by
`LOCAL_WORLD_SIZE` if that is more"""
CUDA_WAIT: Setting[CudaWait] = Setting("cuda_wait", _MEMBERS, "auto", _one_of(CudaWait))
"""who waits for a collective or a message of CUDA tensors. `stream`: as with NCCL, the call and
`wait()` return at once and the current stream waits. `host`: `wait()`, and a call without
`async_op`, returns when the result is there, and raises its error. `auto` (default): the stream,
but the host where ranks of the group share a GPU. What follows from it, and where the host waits in
any case: [performance.md](performance.md#who-waits),
[failures.md](failures.md#when-only-a-stream-waits)"""
HOST = Setting("host", _MEMBERS, "", text)
"""what this worker's host is called, 1 to 255 printable characters. Default: the system's name.
Ranks with one name count as neighbours when an algorithm is chosen
([algorithms.md](algorithms.md))"""
CACHE = Setting("cache", _MEMBERS, "", text)
"""folder of the vendors' lists, collateral and references, where peers show evidence"""
TPM = Setting("tpm", _MEMBERS, "/dev/tpmrm0", text)
"""`/dev/tpmrm0` (default), or a simulator's `tcp://host:port`, `unix:///path`"""
CONTAINER = Setting("container", _MEMBERS, "", text)
"""the container image's digest or the machine's measurement, as statements then name it"""
ALLOW_DEBUGGERS = Setting("allow_debuggers", _MEMBERS, False, _yes_or_no)
"""`false` (default): a process shuts out debuggers before it reads a secret or a private key and
before it makes a group. `true`: it does not"""

TABLE: Final[Mapping[str, Setting[Any]]] = {
    row.name: row for row in list(globals().values()) if isinstance(row, Setting)
}


# ---- reading SEALRING_SETTINGS


@cache
def _members(value: str) -> Mapping[str, Any]:
    """The settings in SEALRING_SETTINGS: `value` is the JSON object or the name of a file with
    it."""
    inline = value.lstrip().startswith("{")
    where = SETTINGS.name if inline else f"{SETTINGS.name}: {value}"
    found = read_object(
        value if inline else _read_file(Path(value), where),
        ConfigurationError(
            f"{where} is not a JSON object: write it as "
            f'{{"{THREADS.name}": 4, "{CUDA_WAIT.name}": "host"}}'
        ),
        MAX_BYTES,
    )
    for name in found:
        if name not in TABLE or TABLE[name].is_variable:
            known = [row.name for row in TABLE.values() if not row.is_variable]
            raise ConfigurationError(
                f"{where}: there is no setting {name[:40]!r}, only {', '.join(known)}"
            )
    return {name: TABLE[name].parsed(one) for name, one in found.items()}


def with_settings(environ: Mapping[str, str], **members: Any) -> dict[str, str]:
    """The environment's SEALRING_SETTINGS with these members added or replaced."""
    known = _members(environ.get(SETTINGS.name) or "{}")
    return {SETTINGS.name: json.dumps({**known, **members})}


def _read_file(path: Path, where: str) -> bytes:
    """Reads a regular file that only this user or root can have written."""
    try:
        # O_NONBLOCK: a FIFO in the file's place must not hang the worker.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise ConfigurationError(f"{where} cannot be read: {problem.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{where} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigurationError(
                f"{where} belongs to user {status.st_uid}: it must be this user's "
                f"({os.geteuid()}) or root's"
            )
        if status.st_mode & 0o022:
            raise ConfigurationError(
                f"{where} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}): "
                f"run `chmod go-w {path}`"
            )
        content = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{where} is longer than {MAX_BYTES} bytes")
    return content


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each variable whose name is close to that of a setting.

    Other variables with the prefix may be the user's own. For a service named sealring-broker,
    Kubernetes sets such variables, too: NAME_SERVICE_HOST, NAME_PORT and NAME_PORT_8443_TCP.
    """
    endings = [name.removeprefix(_PREFIX) for name in sorted(TABLE) if TABLE[name].is_variable]
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in TABLE or _KUBERNETES.search(name):
            continue
        for near in difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1, 0.8):
            yield (
                f"{name} is set, but sealring does not read it: {_PREFIX}{near} is the nearest "
                "name that it reads"
            )
