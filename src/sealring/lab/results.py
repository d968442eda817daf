"""The kinds of case that a results file holds. A change here is a new VERSION.

Every case has one variant and all of its samples, in seconds per call. Variants that were measured
alternately in one run carry the same `run`, and their samples belong together by place: sample i of
one was taken right beside sample i of the other.

plain     torch's own backend: Gloo, or on GPUs NCCL
sealed    sealring
unsealed  sealring's path through a GPU without its cryptography, for comparison
cc        today's GPU-TEE path, emulated
compute   no communication at all: what the model, or the kernel, takes by itself
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
"""`none`: nothing was sent. Of tensors on a GPU: `host` is pinned memory, `peer` another process's
memory on a GPU, `nccl` NCCL, `hosts` peer memory inside each of two hosts and NCCL between them;
`gpu` is whichever of them sealring chose. `tcp` is Gloo there."""
Kernel = Literal[
    "seal", "open", "reduce", "copy", "open_reduce", "hop", "cipher", "launch", "matmul"
]
"""`matmul`: a float32 matrix product on one core or GPU, the roofline's ceiling of arithmetic.
`launch`: one small record sealed, from the launch until it is there."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. Nothing here names a person, a host or an address."""

    architecture: str
    cpu: str
    cores: int
    """That this process may use."""
    features: list[str]
    """Of the processor, as far as they matter here: aes, pmull, vaes, avx512f ..."""
    memory_bytes: int
    gpus: list[str]
    gpu_memory_bytes: int
    """Of the smallest of them; 0 where there is none."""
    system: str
    python: str
    torch: str
    openssl: str
    sealring: str


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel by itself, on data that it finds in memory."""

    kernel: Kernel
    device: str
    """`cpu`, or the GPU's name."""
    suite: str
    """Empty where no cipher is involved."""
    bytes: int
    """Of plaintext per call."""
    record_bytes: int
    """A call works on records of this many bytes."""
    processes: int
    """So many did the same at once, each on a core of its own as far as there are any."""
    moved_bytes: int
    """Read from and written to memory per call: the roofline's bytes."""
    operations: int
    """Arithmetic per call: the roofline's height. 0 where it only moves bytes."""
    run: int
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class LinkPoint:
    bytes: int
    """In one message."""
    messages: int
    """That follow each other in one call."""
    seconds: list[float]
    """Per call."""


@dataclass(frozen=True, slots=True)
class Fit:
    """T = alpha * messages + bytes / beta, with what a repetition would give in 19 of 20 cases."""

    alpha_s: float
    alpha_low_s: float
    alpha_high_s: float
    beta_bytes_per_s: float
    beta_low_bytes_per_s: float
    beta_high_bytes_per_s: float
    residual: float
    """Median distance of a point from the line, as a part of the point."""


@dataclass(frozen=True, slots=True)
class LinkCase:
    """Between two ranks of this machine, by size.

    ping_pong    a message there and one back, one after the other; a call is one way (half of it)
    all_reduce   of two ranks: both send and receive at once, as in every hop of a ring
    """

    operation: Literal["ping_pong", "all_reduce"]
    transport: Transport
    variant: Variant
    device: str
    run: int
    points: list[LinkPoint]
    fit: Fit | None
    """None where the points do not lie on a line."""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    collective: str
    """As lab/bench/collectives.py names them."""
    ranks: int
    bytes: int
    """As lab/bench/collectives.py counts them."""
    dtype: str
    transport: Transport
    variant: Variant
    device: str
    sealed_bytes: int
    """Plaintext that the busiest rank sealed in one call; 0 where nothing is sealed."""
    opened_bytes: int
    run: int
    seconds: list[float]
    """Of the slowest rank."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of one step on one rank: how long it was busy with this, beside computing and instead."""

    name: Literal[
        "forward", "backward", "optimizer", "compute", "seal", "transfer", "open", "reduce", "wait"
    ]
    exposed_s: float
    """While nothing was computed: the step is longer by this."""
    hidden_s: float
    """While the model computed."""


@dataclass(frozen=True, slots=True)
class Span:
    """In the recorded step of rank 0; times from the step's start."""

    lane: Literal["compute", "collective"]
    name: str
    start_s: float
    end_s: float
    bytes: int
    """Of the collective's tensor; 0 in lane `compute`."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """A training step. Variant `compute` is the same step by `ranks` processes that do not talk:
    no DDP, no group. Its split gives forward, backward and optimizer."""

    model: str
    parameters: int
    ranks: int
    batch: int
    """Samples (sequences, images) per rank."""
    tokens: int
    """Per rank; 0 where the model has none."""
    precision: Literal["fp32", "bf16", "fp16"]
    bucket_cap_mb: float
    """0 in variant `compute`."""
    all_reduces: int
    """Per step; 0 in variant `compute`."""
    transport: Transport
    variant: Variant
    device: str
    sealed_bytes: int
    """Plaintext that rank 0 sealed in one step."""
    run: int
    seconds: list[float]
    """Of the slowest rank."""
    split: list[Part]
    """Of rank 0, in one step that was recorded after the timed ones; empty where none was."""
    timeline: list[Span] = field(default_factory=list)
    """Of that same step."""


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """Groups of light workers, many in a process, and what it took to form them."""

    ranks: int
    what: str
    """world, all_reduce or mesh (lab/bench/forming.py)."""
    handshakes: int
    """TLS handshakes of all ranks in this part."""
    resumptions: int
    """Connections under a session, without TLS."""
    sockets: int
    """Open at its end, both ends counted."""
    bytes: int
    """Sent in this machine's network meanwhile, by whichever process."""
    seconds: float
    cpu_seconds_per_rank: float
    floor_seconds_per_rank: float
    """Of the processor, for the signatures alone that a rank makes and verifies in this part."""
    rss_bytes: int
    """Of all processes at its end."""


@dataclass(frozen=True, slots=True)
class Results:
    command: str
    """That made this file."""
    made: str
    """When it was begun, in UTC: 2026-11-15T08:00:00Z."""
    complete: bool
    """False where the run was stopped before its end; the cases are those measured by then."""
    stopped: str | None
    """Why, in one sentence."""
    machine: Machine
    aead: list[KernelCase] = field(default_factory=list)
    link: list[LinkCase] = field(default_factory=list)
    allreduce: list[CollectiveCase] = field(default_factory=list)
    collectives: list[CollectiveCase] = field(default_factory=list)
    step: list[StepCase] = field(default_factory=list)
    gpu: list[KernelCase] = field(default_factory=list)
    """A GPU's kernels. Its collectives and steps are among the others, under its name."""
    scale: list[ScaleCase] = field(default_factory=list)
    algorithms: str = ""
    """The table by which sealed collectives chose their algorithm, as TOML (schedule/table.py);
    empty where it is not known."""


Case = TypeVar("Case", KernelCase, LinkPoint, CollectiveCase, StepCase)


def usable(cases: Iterable[Case]) -> list[Case]:
    """Those with samples: a file may come from anybody."""
    return [case for case in cases if case.seconds and min(case.seconds) > 0]


def spread_of(seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a part of the median."""
    if len(seconds) < 2 or not (middle := statistics.median(seconds)):
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


# ---- What this machine is, as far as it explains a measurement


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
"""Arm's kernels give numbers where x86 gives a name (MIDR_EL1: implementer and part)."""


def _arm_name(info: dict[str, str]) -> str | None:
    implementer, part = info.get("CPU implementer"), info.get("CPU part")
    if implementer is None or part is None:
        return None
    known = _ARM_PARTS.get((implementer, part))
    return known or f"implementer {implementer}, part {part}"


def _gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each."""
    import torch

    if not torch.cuda.is_available():
        return []
    all_ = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in all_]


# ---- Results as a file: whole or not at all, and refused unless every field is as it should be


FORMAT: Final = "sealring bench results"
_MAX_BYTES: Final = 256 << 20


def write_results(path: Path, results: Results) -> None:
    """Replaces an older file. What could not be read back is not written."""
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
    # The last line says that all before it is there.
    return json.dumps({**head, **dataclasses.asdict(results), "end": True}, indent=1) + "\n"


def from_json(text: str | bytes, name: str) -> Results:
    """Reads back what to_json wrote; `name` is what an error calls it."""
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
