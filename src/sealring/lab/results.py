"""The kinds of cases in a results file. Changing them needs a new VERSION.

Every case has one variant and all of its samples, in seconds per call. Variants that were measured
alternately in one run have the same `run`, and their samples form pairs: sample i of one was taken
right before or after sample i of the other.

plain     torch's own backend: Gloo, or on GPUs NCCL
sealed    sealring
unsealed  sealring's path through a GPU without its cryptography, for comparison
cc        today's GPU-TEE path, emulated
compute   no communication: the model, or the kernel, by itself
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal, TypeVar

from sealring.errors import ConfigurationError
from sealring.formats.files import write_public
from sealring.formats.strict import read_json, strictly
from sealring.version import __version__

VERSION: Final = 4

Variant = Literal["plain", "sealed", "unsealed", "cc", "compute"]
Transport = Literal["shm", "tcp", "host", "peer", "nccl", "hosts", "gpu", "none"]
"""How bytes were sent; `none` if nothing was. For tensors on a GPU: `host` is pinned memory, `peer`
is another process's memory on a GPU, `nccl` is NCCL, `hosts` is peer memory inside each of two
hosts and NCCL between them, `gpu` is the way that sealring chose, and `tcp` is Gloo."""
Kernel = Literal[
    "seal", "open", "reduce", "copy", "open_reduce", "hop", "cipher", "launch", "matmul"
]
"""`matmul`: a float32 matrix product on one core or GPU, the arithmetic limit of the roofline.
`launch`: sealing one small record, from the launch to its end."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement. It names no person, host or address."""

    architecture: str
    cpu: str
    cores: int
    """The cores that this process may use."""
    features: list[str]
    """The processor's features that matter here: aes, pmull, vaes, avx512f ..."""
    memory_bytes: int
    gpus: list[str]
    gpu_memory_bytes: int
    """The memory of the smallest GPU; 0 if there is none."""
    system: str
    python: str
    torch: str
    openssl: str
    sealring: str


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel by itself, on data in memory."""

    kernel: Kernel
    device: str
    """`cpu`, or the GPU's name."""
    suite: str
    """The cipher suite; empty if no cipher is used."""
    bytes: int
    """Bytes of plaintext per call."""
    record_bytes: int
    """The size of the records of a call."""
    processes: int
    """How many processes did the same at once, each on its own core as far as there are enough."""
    moved_bytes: int
    """Bytes read from and written to memory per call, for the roofline."""
    operations: int
    """Arithmetic operations per call, for the roofline; 0 if the kernel only moves bytes."""
    run: int
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class LinkPoint:
    bytes: int
    """Bytes in one message."""
    messages: int
    """Messages in one call, one after the other."""
    seconds: list[float]
    """Seconds per call."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The line T = alpha * messages + bytes / beta, with intervals of 95 % confidence."""

    alpha_s: float
    alpha_low_s: float
    alpha_high_s: float
    beta_bytes_per_s: float
    beta_low_bytes_per_s: float
    beta_high_bytes_per_s: float
    residual: float
    """The median relative distance of a point from the line."""


@dataclass(frozen=True, slots=True)
class LinkCase:
    """Times between two ranks of this machine, by size.

    ping_pong    a message there, then one back; the time is that of one way (half of it)
    all_reduce   all_reduce of two ranks: both send and receive at once, as in each hop of a ring
    """

    operation: Literal["ping_pong", "all_reduce"]
    transport: Transport
    variant: Variant
    device: str
    run: int
    points: list[LinkPoint]
    fit: Fit | None
    """The fitted line; None if the points are not on a line."""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    collective: str
    """The name in lab/bench/collectives.py."""
    ranks: int
    bytes: int
    """Bytes as lab/bench/collectives.py counts them."""
    dtype: str
    transport: Transport
    variant: Variant
    device: str
    sealed_bytes: int
    """Plaintext that the busiest rank sealed in one call; 0 if nothing is sealed."""
    opened_bytes: int
    run: int
    seconds: list[float]
    """The times of the slowest rank."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """One kind of work in one step on one rank: how long it took, hidden and exposed."""

    name: Literal[
        "forward", "backward", "optimizer", "compute", "seal", "transfer", "open", "reduce", "wait"
    ]
    exposed_s: float
    """Time while nothing was computed, which makes the step longer."""
    hidden_s: float
    """Time while the model computed."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the timeline of rank 0's recorded step; times count from the step's start."""

    lane: Literal["compute", "collective"]
    name: str
    start_s: float
    end_s: float
    bytes: int
    """Bytes of the collective's tensor; 0 in lane `compute`."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """A training step. Variant `compute` is the same step without DDP and without a group, by as
    many processes. Its split gives forward, backward and optimizer."""

    model: str
    parameters: int
    ranks: int
    batch: int
    """Samples (sequences, images) per rank."""
    tokens: int
    """Tokens per rank; 0 if the model has none."""
    precision: Literal["fp32", "bf16", "fp16"]
    bucket_cap_mb: float
    """0 in variant `compute`."""
    all_reduces: int
    """All-reduces per step; 0 in variant `compute`."""
    transport: Transport
    variant: Variant
    device: str
    sealed_bytes: int
    """Plaintext that rank 0 sealed in one step."""
    run: int
    seconds: list[float]
    """The times of the slowest rank."""
    split: list[StepPart]
    """The parts of one step on rank 0, recorded after the timed steps; empty if none was."""
    timeline: list[Span] = field(default_factory=list)
    """The timeline of that recorded step."""


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """The costs of forming groups of light workers, of which a process has many."""

    ranks: int
    what: str
    """world, all_reduce or mesh (lab/bench/forming.py)."""
    handshakes: int
    """TLS handshakes of all ranks in this part."""
    resumptions: int
    """Connections under an existing session, without TLS."""
    sockets: int
    """Open sockets at the end of the part, counting both ends."""
    bytes: int
    """Bytes that all processes of this machine sent during the part."""
    seconds: float
    cpu_seconds_per_rank: float
    floor_seconds_per_rank: float
    """CPU time of only the signatures that a rank makes and verifies in this part."""
    rss_bytes: int
    """Memory of all processes at the end of the part."""


@dataclass(frozen=True, slots=True)
class Results:
    command: str
    """The command that made this file."""
    made: str
    """When the run began, in UTC, such as 2026-11-15T08:00:00Z."""
    complete: bool
    """False if the run was stopped before its end; then the cases are those measured so far."""
    stopped: str | None
    """Why the run was stopped, in one sentence."""
    machine: Machine
    aead: list[KernelCase] = field(default_factory=list)
    link: list[LinkCase] = field(default_factory=list)
    allreduce: list[CollectiveCase] = field(default_factory=list)
    collectives: list[CollectiveCase] = field(default_factory=list)
    step: list[StepCase] = field(default_factory=list)
    gpu: list[KernelCase] = field(default_factory=list)
    """Kernels of a GPU. Its collectives and steps are among the others, with the GPU's name."""
    scale: list[ScaleCase] = field(default_factory=list)
    algorithms: str = ""
    """The table of algorithms of sealed collectives, as TOML (schedule/table.py); empty if
    unknown."""


Case = TypeVar("Case", KernelCase, LinkPoint, CollectiveCase, StepCase)


def usable(cases: Iterable[Case]) -> list[Case]:
    """The cases that have valid samples. (A file may come from anybody.)"""
    return [case for case in cases if case.seconds and min(case.seconds) > 0]


def spread_of(seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    if len(seconds) < 2 or not (middle := statistics.median(seconds)):
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


# ---- the description of this machine, as far as it explains a measurement


_FEATURES: Final = (
    "aes", "pmull", "sha2", "sve", "sve2", "vaes", "vpclmulqdq", "avx2", "avx512f", "amx_tile"
)  # fmt: skip


def this_machine() -> Machine:
    from sealring import _native

    info = _cpu_info()
    gpus = _gpus()
    flags = set(info.get("flags", info.get("Features", "")).split())
    return Machine(
        architecture=platform.machine(),
        cpu=info.get("model name") or _arm_name(info) or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        features=[name for name in _FEATURES if name in flags],
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=[name for name, _ in gpus],
        gpu_memory_bytes=min((memory for _, memory in gpus), default=0),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        openssl=_native.openssl_version(),
        sealring=__version__,
    )


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


_ARM_PARTS: Final = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}
"""Names of Arm processors: on Arm, the kernel gives only numbers (MIDR_EL1: implementer, part)."""


def _arm_name(info: dict[str, str]) -> str | None:
    implementer, part = info.get("CPU implementer"), info.get("CPU part")
    if implementer is None or part is None:
        return None
    known = _ARM_PARTS.get((implementer, part))
    return known or f"implementer {implementer}, part {part}"


def _gpus() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    all_ = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in all_]


# ---- the results file: written atomically, and refused unless every field is valid


FORMAT: Final = "sealring bench results"
_MAX_BYTES: Final = 256 << 20


def write_results(path: Path, results: Results) -> None:
    """Writes the results, replacing an older file. Checks first that they can be read back."""
    text = to_json(results)
    from_json(text, "these results")
    write_public(path, text.encode())


def read_results(path: Path) -> Results:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(
            f"the results {path} cannot be read: {problem.strerror}. "
            "Make some with `sealring bench all`."
        ) from problem
    if len(content) > _MAX_BYTES:
        raise ConfigurationError(f"{path} is larger than {_MAX_BYTES} bytes: it holds no results")
    return from_json(content, str(path))


def to_json(results: Results) -> str:
    head = {"format": FORMAT, "version": VERSION}
    # The last field shows that the file is complete.
    return json.dumps({**head, **dataclasses.asdict(results), "end": True}, indent=1) + "\n"


def from_json(text: str | bytes, name: str) -> Results:
    """Parses what to_json wrote; `name` names it in errors."""
    try:
        document = read_json(text, numbers="any")  # a NaN is named below
    except ValueError:
        start = text[:200].decode("utf-8", "replace") if isinstance(text, bytes) else text[:200]
        if FORMAT in start:
            raise ConfigurationError(
                f"{name} is cut short: copy it again, or measure again with `sealring bench all`"
            ) from None
        raise ConfigurationError(
            f"{name} is not JSON, so it holds no results; `sealring bench all` writes results.json"
        ) from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ConfigurationError(
            f"{name} holds no bench results; `sealring bench all` writes results.json"
        )
    version = document.pop("version", None)
    if version != VERSION:
        raise ConfigurationError(
            f"{name} holds results of version {version!r}, and this sealring reads {VERSION}: "
            "measure again with `sealring bench all`"
        )
    if document.pop("end", None) is not True:
        raise ConfigurationError(f"{name} is cut short: measure again with `sealring bench all`")
    return strictly(Results, document, name, "results file")
