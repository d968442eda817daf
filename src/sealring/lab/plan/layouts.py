"""One training step by layout: how the model is spread over ranks, its memory and its time.

ddp      every rank has the whole model; gradients are all-reduced, bucket by bucket
fsdp     every rank has a part of each unit; units are gathered before use, gradients scattered
tp x pp  layers are split within a host, and stages are chained; replicas all-reduce gradients
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from sealring import limits
from sealring.core.schedule import ALGORITHMS, Algorithm, Operation, Selection, Topology
from sealring.core.schedule.choose import NOTHING_SET, everywhere
from sealring.core.schedule.table import AlgorithmTable
from sealring.errors import ConfigurationError
from sealring.lab.plan.collectives import Cluster, collective, lanes_of, longest_slot
from sealring.lab.plan.models import Model
from sealring.lab.plan.profiles import Network, Profile, Route, Way, costs_of, cutting_of

# ---- how DDP puts gradients into buckets  From the second step on, torch fills buckets in the
# order in which gradients arrived in the first step, which is the reverse of registration. The
# gradient that makes a bucket full still goes into it. With the default bucket_cap_mb, the first
# bucket is full at 1 MiB, so that the first all-reduce starts early. A given cap is also that of
# the first bucket.


DEFAULT_CAP_MB: Final = 25.0
_DEFAULT_FIRST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    bytes: int
    ready: float
    """The part of backward after which the whole bucket is computed."""


def limits_of(cap_mb: float | None) -> tuple[int, int]:
    """The limits in bytes of the first bucket and of the others; None is torch's default."""
    if cap_mb is None:
        return _DEFAULT_FIRST_BYTES, int(DEFAULT_CAP_MB * (1 << 20))
    if not 0 < cap_mb < 1 << 30:
        raise ConfigurationError(
            f"a bucket of {cap_mb:g} MB holds no gradient: it is a number above 0"
        )
    limit = max(1, int(cap_mb * (1 << 20)))
    return limit, limit


def fill(sizes: Sequence[int], limits: tuple[int, int]) -> list[list[int]]:
    """Fills buckets; returns the indices into `sizes` for each bucket."""
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        current.append(index)
        held += size
        if held >= limits[1 if buckets else 0]:
            buckets.append(current)
            current, held = [], 0
    return [*buckets, current] if current else buckets


def buckets_of(model: Model, cap_mb: float | None, itemsize: int) -> list[Bucket]:
    sizes = [parameter.count * itemsize for parameter in reversed(model.parameters)]
    ready = model.ready_fractions()
    return [
        Bucket(sum(sizes[index] for index in indices), ready[indices[-1]])
        for indices in fill(sizes, limits_of(cap_mb))
    ]


# ---- the memory of a rank that trains with Adam, by layout


Precision = Literal["fp32", "bf16", "fp16"]

ITEMSIZE: Final[dict[Precision, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of parameters and gradients."""
_OPTIMIZER_BYTES: Final[dict[Precision, int]] = {"fp32": 8, "bf16": 12, "fp16": 12}
"""Bytes per parameter of Adam's two float32 moments and, for short types, of a float32 copy."""


@dataclass(frozen=True, slots=True)
class Memory:
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """DDP's buckets, FSDP's gathered units."""
    host_links: float
    """sealring's memory on the host: rings and record buffers of all links."""

    @property
    def device_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def link_bytes(cluster: Cluster) -> float:
    """The memory of a rank's links to all others: two rings in shared memory, or two records
    each."""
    inside = min(cluster.per_host, cluster.ranks) - 1
    between = cluster.ranks - 1 - inside
    return float(inside * 2 * limits.RING_BYTES + between * 2 * limits.RECORD_BYTES)


def ddp_memory(model: Model, cluster: Cluster, precision: Precision, batch: int) -> Memory:
    """The memory with DDP. Every rank has the whole model; buckets are a copy of the gradients."""
    buckets = float(model.count * ITEMSIZE[precision])
    return _memory(model, cluster, precision, samples=batch, parts=1, buffers=buckets)


def fsdp_memory(
    model: Model, cluster: Cluster, precision: Precision, batch: int, largest_unit: int
) -> Memory:
    """The memory with FSDP: a part of the model, the unit that computes, the one that is gathered,
    and its gradients."""
    units = 3.0 * largest_unit * ITEMSIZE[precision]
    return _memory(model, cluster, precision, samples=batch, parts=cluster.ranks, buffers=units)


def sharded_memory(
    model: Model, cluster: Cluster, precision: Precision, tensor: int, pipeline: int
) -> Memory:
    """The memory with tensor x pipeline parallelism and microbatches of one sample. The first stage
    has as many of them under way as there are stages."""
    shards = tensor * pipeline
    held = model.count * ITEMSIZE[precision] / shards
    return _memory(model, cluster, precision, samples=1 / tensor, parts=shards, buffers=held)


def _memory(
    model: Model,
    cluster: Cluster,
    precision: Precision,
    *,
    samples: float,
    parts: int,
    buffers: float,
) -> Memory:
    """The memory of a rank with one of `parts` parts of the model, and activations of `samples`."""
    size = ITEMSIZE[precision]
    return Memory(
        parameters=model.count * size / parts,
        gradients=model.count * size / parts,
        optimizer=model.count * _OPTIMIZER_BYTES[precision] / parts,
        activations=model.activation_values * samples * size,
        buffers=buffers,
        host_links=link_bytes(cluster),
    )


# ---- gradients are exchanged while backward computes, as far as possible
#
# All ranks do the same at the same time. On a host, computing and the engines share the cores (on a
# GPU: the GPU). If they need more than there is, all of them slow down equally.


MOVED_AFTER_S: Final = 0.5e-3
"""Linux does not move a thread to another core if it ran within this time
(sched_migration_cost)."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The seconds of a rank's step without communication, while all ranks of its host compute."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class StepCollective:
    """One collective of a step."""

    ready: float
    """The part of backward after which it can begin."""
    seconds: float
    """The time by itself, with a core for every engine."""
    busy_s: float
    """The part of `seconds` that needs the core."""
    threads: int = 1
    """The threads that share it, each of which needs a core."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share the cores of a host."""

    cores: float
    ranks: int
    yields: bool = False
    """Whether a waiting engine yields its core and does not sleep, as sealring's do on CPUs. Such
    an engine stays on its core. A thread that sleeps wakes up on a free core, so such ranks are
    spread evenly over the cores."""
    settled: bool = True
    """False shortly after the start, when no rank has been moved to another core yet."""

    @property
    def on_a_core(self) -> float:
        """The number of ranks on the busiest core, for which all others wait in a collective. So
        three ranks that yield take as long on two cores as four."""
        even = max(1.0, self.ranks / self.cores)
        if not self.yields:
            return even
        if self.settled or even == 1.0:
            return float(math.ceil(even))
        return float(_busiest(self.ranks, max(1, int(self.cores))))

    @property
    def turns(self) -> float:
        """How many times route.turn_s passes when an engine has run out of records: once for each
        other rank on its core; but at most once if engines yield, since the others work then."""
        further = self.on_a_core - 1.0
        return min(further, 1.0) if self.yields else further

    def speed(self, computing: bool, part: float, threads: int = 1) -> float:
        """The speed of every thread, if each rank's engines work `part` of their time when they
        have their own cores. A slowed engine works for longer, but does not wait for longer."""
        if part <= 0.0:
            return min(1.0, self.cores / self.ranks) if computing else 1.0
        # The cores of a rank. Computing takes so long that it is moved between cores.
        cores = self.cores / self.ranks
        if not computing and self.on_a_core > 1.0:
            cores = 1.0 / self.on_a_core
        slow, fast = 0.0, 1.0
        for _ in range(40):
            middle = (slow + fast) / 2
            at_work = part / (part + (1.0 - part) * middle)
            if middle * (float(computing) + threads * at_work) > cores:
                fast = middle
            else:
                slow = middle
        return fast


@lru_cache(maxsize=64)
def _busiest(ranks: int, cores: int) -> int:
    """The median number of ranks on the busiest core if each rank is on a random core."""
    for most in range(1, ranks):
        ways = [1.0] + [0.0] * ranks  # by the ranks that have a core so far, over ranks' factorial
        for _ in range(cores):
            ways = [
                sum(ways[n - k] / math.factorial(k) for k in range(min(n, most) + 1))
                for n in range(ranks + 1)
            ]
        if ways[ranks] * math.factorial(ranks) >= 0.5 * cores**ranks:
            return most
    return ranks


@dataclass(frozen=True, slots=True)
class PlannedStep:
    seconds: float
    communicating_s: float
    exposed_s: float
    """The part of `communicating_s` during which nothing was computed."""
    slowed_s: float
    """How much longer computing took because engines shared its cores."""

    @property
    def hidden_s(self) -> float:
        return self.communicating_s - self.exposed_s


def run_step(
    compute: Compute,
    exchanges: Sequence[StepCollective],
    sharing: Sharing,
    *,
    overlaps: bool = True,
) -> PlannedStep:
    """Simulates a step. `exchanges` run one at a time, in order, as with DDP and the engines."""
    alone = sharing.speed(True, 0.0)
    now, progress = compute.forward_s, 0.0
    slowed = communicating = exposed = 0.0
    for exchange in exchanges:
        due = (exchange.ready if overlaps else 1.0) * compute.backward_s
        if progress < due:  # nothing to send yet: backward uses the cores alone
            now += due - progress
            progress = due
        part = exchange.busy_s / exchange.seconds if exchange.seconds > 0 else 0.0
        left = exchange.seconds
        while left > 0:
            computing = progress < compute.backward_s
            speed = sharing.speed(computing, part, exchange.threads)
            # Only the part that needs the core is slowed, not waiting for a link.
            stretch = part / speed + (1.0 - part)
            took = left * stretch
            if computing:
                pace = speed / alone
                until_done = (compute.backward_s - progress) / pace
                took = min(took, until_done)
                progress = compute.backward_s if took == until_done else progress + took * pace
                slowed += took * (1.0 - pace)
            else:
                exposed += took
            now += took
            communicating += took
            left -= took / stretch
            if left < 1e-12:
                break
    now += compute.backward_s - progress
    return PlannedStep(now + compute.optimizer_s, communicating, exposed, slowed)


# ---- steps by layout


_GLOO: Final = (Algorithm.RING,)
_NCCL: Final = (Algorithm.RING, Algorithm.TREE, Algorithm.HIERARCHICAL)
"""NCCL uses the fastest of these. Between hosts its rings use every GPU's own port, which the
hierarchical algorithm stands for."""
_INSIDE: Final = (Algorithm.RING, Algorithm.TREE)


class Taken(NamedTuple):
    """The cost of one collective for each rank."""

    seconds: float
    engine_s: float
    """The part of `seconds` during which an engine works."""
    algorithm: Algorithm
    threads: int
    """The engines that share it."""


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """One way on one cluster; it is asked about many sizes."""

    profile: Profile
    way: Way
    network: Network
    cluster: Cluster
    algorithm: Algorithm | None = None
    """The value of the setting "algorithm"; None: the table chooses."""
    table: AlgorithmTable | None = None
    """The table of algorithms; None: sealring's own."""
    settled: bool = True
    """False if ranks that share cores are still on the cores where they woke up."""

    @property
    def route(self) -> Route:
        route = self.profile.way(self.way)
        assert route is not None
        return route

    def on(self, cluster: Cluster) -> ClusterSetting:
        return dataclasses.replace(self, cluster=cluster)

    def sharing(self) -> Sharing:
        ranks = min(self.cluster.per_host, self.cluster.ranks)
        device = self.profile.device
        yields = self.way == "sealed" and device.kind == "cpu"
        return Sharing(device.cores_per_host.value, ranks, yields, self.settled)

    def takes(self, operation: Operation, nbytes: int, *, waits: bool = False) -> Taken:
        """The cost of one collective. With `waits`, the caller waits for it, and has made such a
        call before."""
        route = self.route
        if self.way == "sealed":
            select = _selection(self.cluster, self.algorithm, self.table)
            candidates = [select(operation, nbytes)]
        else:
            wanted = _NCCL if self.profile.device.kind == "gpu" else _GLOO
            several = self.cluster.hosts > 1
            candidates = [
                each
                for each in wanted
                if each in ALGORITHMS[operation] and (several or each in _INSIDE)
            ]
        costs = costs_of(route, self.network, self.sharing().turns)
        cutting = cutting_of(self.profile, self.way, self.sharing().ranks)
        timed = [
            (collective(operation, each, self.cluster, nbytes, costs, cutting), each)
            for each in candidates
        ]
        outcome, algorithm = min(timed, key=lambda pair: pair[0].seconds)
        # On CPUs the call itself runs on the engine's core.
        call = route.call_s.value
        if waits and nbytes <= limits.PREPARED_BYTES:
            call -= route.prepared_s.value
        busy = call if self.profile.device.kind == "cpu" else 0.0
        slot = longest_slot(operation, algorithm, self.cluster, nbytes)
        lanes = lanes_of(operation, algorithm, self.cluster, slot, cutting)
        return Taken(outcome.seconds + call, outcome.engine_s + busy, algorithm, lanes)

    def exchange(
        self, operation: Operation, nbytes: int, ready: float = 1.0, *, waits: bool = False
    ) -> StepCollective:
        taken = self.takes(operation, nbytes, waits=waits)
        busy = taken.engine_s * self.route.core_share.value
        return StepCollective(ready, taken.seconds, busy, taken.threads)


@lru_cache(maxsize=256)
def _selection(
    cluster: Cluster, algorithm: Algorithm | None, table: AlgorithmTable | None
) -> Selection:
    """The algorithm selection of a group of these ranks."""
    fixed = NOTHING_SET if algorithm is None else everywhere(algorithm)
    return Selection(Topology(cluster.host_of()), table, fixed)


def compute_of(model: Model, profile: Profile, ranks: int, batch: int, p: Precision) -> Compute:
    """Computes the times from the arithmetic and the device's rate; `ranks` ranks share a host."""
    device = profile.device
    peak = device.fp32_flops if p == "fp32" else device.bf16_flops
    rate = peak.value * device.efficiency.value
    crowd = max(1.0, ranks / device.cores_per_host.value)
    forward = model.forward_flops * batch / rate * crowd
    # Adam reads four values of 4 bytes and writes three, of each parameter.
    optimizer = 28.0 * model.count / device.memory_bytes_per_s.value * crowd
    return Compute(forward, 2.0 * forward, optimizer)


def ddp_step(setting: ClusterSetting, compute: Compute, buckets: Sequence[Bucket]) -> PlannedStep:
    exchanges = [
        setting.exchange(Operation.ALL_REDUCE, bucket.bytes, bucket.ready) for bucket in buckets
    ]
    # DDP copies each gradient, divided, into its bucket, and back when all are reduced.
    sharing = setting.sharing()
    rate = setting.profile.plain.copy_bytes_per_s.value
    crowd = max(1.0, sharing.ranks / sharing.cores)
    copy = sum(bucket.bytes for bucket in buckets) / rate * crowd if rate else 0.0
    with_copies = Compute(compute.forward_s, compute.backward_s + copy, compute.optimizer_s + copy)
    overlaps = bool(setting.route.overlaps.value)
    return run_step(with_copies, exchanges, sharing, overlaps=overlaps)


def alone(setting: ClusterSetting, operation: Operation, nbytes: int) -> float:
    """The seconds of one collective that is called again and again, without other work."""
    early = dataclasses.replace(setting, settled=False)
    exchange = early.exchange(operation, nbytes, waits=True)
    # How long a rank has not run when its turn comes. If it is long, a free core takes the rank.
    waited = (early.sharing().on_a_core - 1.0) * exchange.busy_s
    if waited >= MOVED_AFTER_S:
        early, exchange = setting, setting.exchange(operation, nbytes, waits=True)
    return run_step(Compute(0.0, 0.0, 0.0), [exchange], early.sharing()).seconds


def fsdp_units(model: Model) -> list[int]:
    """The number of elements of each unit, in the order of forward."""
    spans = model.blocks or ((0, len(model.parameters)),)
    return [sum(p.count for p in model.parameters[first:last]) for first, last in spans]


def fsdp_step(
    setting: ClusterSetting, model: Model, compute: Compute, precision: Precision
) -> PlannedStep:
    """Simulates a step with FSDP. While a unit computes, the next one is gathered, and in backward
    the gradients of the previous one are sent."""
    size, ranks = ITEMSIZE[precision], setting.cluster.ranks
    units = fsdp_units(model)
    whole = sum(units)
    overlaps = bool(setting.route.overlaps.value)
    parts = [max(1, -(-unit * size // ranks)) for unit in units]
    gather = [setting.exchange(Operation.ALL_GATHER, part) for part in parts]
    scatter = [setting.exchange(Operation.REDUCE_SCATTER, part) for part in parts]
    busy = sum(
        2 * g.busy_s * g.threads + s.busy_s * s.threads
        for g, s in zip(gather, scatter, strict=True)
    )
    talking = sum(2 * g.seconds + s.seconds for g, s in zip(gather, scatter, strict=True))
    sharing = setting.sharing()
    # Engines that share the cores slow down computing by the time that they use.
    spare = max(0.0, sharing.cores / sharing.ranks - 1.0)
    slowed = max(0.0, busy - spare * compute.total_s)

    link = now = 0.0
    for index, unit in enumerate(units):
        link = (link if overlaps else max(link, now)) + gather[index].seconds
        now = max(now, link) + compute.forward_s * unit / whole
    link = max(link, now)
    for index in reversed(range(len(units))):
        link = (link if overlaps else max(link, now)) + gather[index].seconds
        now = max(now, link) + compute.backward_s * units[index] / whole
        link = max(link, now) + scatter[index].seconds
    end = max(now, link) + slowed + compute.optimizer_s / ranks
    computing = compute.forward_s + compute.backward_s + compute.optimizer_s / ranks
    exposed = max(0.0, end - computing - slowed)
    return PlannedStep(end, talking, min(exposed, talking), slowed)


def tensor_pipeline_step(
    setting: ClusterSetting, model: Model, compute: Compute, batch: int, precision: Precision,
    tensor: int, pipeline: int,
) -> PlannedStep:  # fmt: skip
    """A step with microbatches of one sample. Each layer all-reduces its activations among `tensor`
    ranks, twice forward and twice backward. Stages pass activations on, and at the end replicas
    all-reduce gradients."""
    shape = model.transformer
    assert shape is not None
    size, cluster = ITEMSIZE[precision], setting.cluster
    micro = max(1, batch * tensor * pipeline)
    replicas = cluster.ranks // (tensor * pipeline)
    values = shape.context * shape.width * size
    layers = -(-shape.layers // pipeline)

    within = setting.on(Cluster(tensor, tensor))
    reduce_s = within.exchange(Operation.ALL_REDUCE, values).seconds if tensor > 1 else 0.0
    costs = costs_of(setting.route, setting.network)
    hop = costs.between if tensor * pipeline > cluster.per_host else costs.inside
    hand_on = (
        hop.latency_s + hop.engine_send_s + hop.engine_receive_s
        + values * (max(hop.link_s_per_byte, costs.seal + hop.engine_push_s_per_byte) + costs.open)
        if pipeline > 1 else 0.0
    )  # fmt: skip
    # `compute` is for a whole batch. A microbatch is 1/batch of it, and a rank has 1/(tp x pp).
    work = (compute.forward_s + compute.backward_s) / batch / (tensor * pipeline)
    stage = work + 4.0 * layers * reduce_s + 2.0 * hand_on
    running = stage * (micro + pipeline - 1)
    gradients = 0.0
    if replicas > 1:
        peers = setting.on(Cluster(replicas, max(1, cluster.per_host // (tensor * pipeline))))
        part = -(-model.count * size // (tensor * pipeline))
        gradients = peers.exchange(Operation.ALL_REDUCE, part).seconds
    optimizer = compute.optimizer_s / (tensor * pipeline)
    total = running + gradients + optimizer
    talking = (stage - work) * (micro + pipeline - 1) + gradients
    return PlannedStep(total, talking, talking, 0.0)
