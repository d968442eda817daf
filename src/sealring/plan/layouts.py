"""How a step runs when the model is spread over ranks in one of three ways, and how long it takes.

ddp      every rank has all of the model; gradients are all-reduced, bucket by bucket
fsdp     every rank has a part of each unit; units are gathered before use, gradients scattered
tp x pp  layers are cut within a host and stages are chained; replicas of that all-reduce gradients
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from sealring import limits
from sealring.plan.buckets import Bucket
from sealring.plan.collectives import Cluster, collective, lanes_of, longest_slot
from sealring.plan.memory import ITEMSIZE, Precision
from sealring.plan.model import Model
from sealring.plan.profiles import Network, Profile, Route, Way, costs_of, cutting_of
from sealring.plan.timeline import MOVED_AFTER_S, Compute, Exchange, Sharing, Step, run_step
from sealring.schedule import ALGORITHMS, Algorithm, Operation, Selection, Topology
from sealring.schedule.choose import NOTHING_SET, everywhere
from sealring.schedule.table import AlgorithmTable

_GLOO: Final = (Algorithm.RING,)
_NCCL: Final = (Algorithm.RING, Algorithm.TREE, Algorithm.HIERARCHICAL)
"""It takes what is faster. Between hosts its rings use every GPU's own port, as here the
hierarchical algorithm does."""
_INSIDE: Final = (Algorithm.RING, Algorithm.TREE)


class Taken(NamedTuple):
    """What one collective takes of each rank."""

    seconds: float
    engine_s: float
    """Of these, what an engine works."""
    algorithm: Algorithm
    threads: int
    """Engines that share it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way over one cluster: what is asked again and again with other sizes."""

    profile: Profile
    way: Way
    network: Network
    cluster: Cluster
    algorithm: Algorithm | None = None
    """What SEALRING_ALGORITHM says; None: the table's choice."""
    table: AlgorithmTable | None = None
    """None: sealring's own."""
    settled: bool = True
    """False: ranks that share cores are still where they happened to wake up."""

    @property
    def route(self) -> Route:
        route = self.profile.way(self.way)
        assert route is not None
        return route

    def on(self, cluster: Cluster) -> Setting:
        return dataclasses.replace(self, cluster=cluster)

    def sharing(self) -> Sharing:
        ranks = min(self.cluster.per_host, self.cluster.ranks)
        device = self.profile.device
        yields = self.way == "sealed" and device.kind == "cpu"
        return Sharing(device.cores_per_host.value, ranks, yields, self.settled)

    def takes(self, operation: Operation, nbytes: int, *, waits: bool = False) -> Taken:
        """One collective; with `waits`, one whose caller waits for it and has made such a call
        before."""
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
        # On CPUs the call itself runs on the core that the engine runs on.
        call = route.call_s.value
        if waits and nbytes <= limits.PREPARED_BYTES:
            call -= route.prepared_s.value
        busy = call if self.profile.device.kind == "cpu" else 0.0
        slot = longest_slot(operation, algorithm, self.cluster, nbytes)
        lanes = lanes_of(operation, algorithm, self.cluster, slot, cutting)
        return Taken(outcome.seconds + call, outcome.engine_s + busy, algorithm, lanes)

    def exchange(
        self, operation: Operation, nbytes: int, ready: float = 1.0, *, waits: bool = False
    ) -> Exchange:
        taken = self.takes(operation, nbytes, waits=waits)
        busy = taken.engine_s * self.route.core_share.value
        return Exchange(ready, taken.seconds, busy, taken.threads)


@lru_cache(maxsize=256)
def _selection(
    cluster: Cluster, algorithm: Algorithm | None, table: AlgorithmTable | None
) -> Selection:
    """As a group of these ranks would choose."""
    fixed = NOTHING_SET if algorithm is None else everywhere(algorithm)
    return Selection(Topology(cluster.host_of()), table, fixed)


def compute_of(model: Model, profile: Profile, ranks: int, batch: int, p: Precision) -> Compute:
    """From arithmetic and the device's rate; `ranks` of them share a host."""
    device = profile.device
    peak = device.fp32_flops if p == "fp32" else device.bf16_flops
    rate = peak.value * device.efficiency.value
    crowd = max(1.0, ranks / device.cores_per_host.value)
    forward = model.forward_flops * batch / rate * crowd
    # Adam reads four values of 4 bytes and writes three, of each parameter.
    optimizer = 28.0 * model.count / device.memory_bytes_per_s.value * crowd
    return Compute(forward, 2.0 * forward, optimizer)


def ddp_step(setting: Setting, compute: Compute, buckets: Sequence[Bucket]) -> Step:
    exchanges = [
        setting.exchange(Operation.ALL_REDUCE, bucket.bytes, bucket.ready) for bucket in buckets
    ]
    # DDP itself copies each gradient into its bucket, divided, and back when all are reduced.
    sharing = setting.sharing()
    rate = setting.profile.plain.copy_bytes_per_s.value
    crowd = max(1.0, sharing.ranks / sharing.cores)
    copy = sum(bucket.bytes for bucket in buckets) / rate * crowd if rate else 0.0
    with_copies = Compute(compute.forward_s, compute.backward_s + copy, compute.optimizer_s + copy)
    overlaps = bool(setting.route.overlaps.value)
    return run_step(with_copies, exchanges, sharing, overlaps=overlaps)


def alone(setting: Setting, operation: Operation, nbytes: int) -> float:
    """One collective by itself, again and again, on as many cores as there are."""
    early = dataclasses.replace(setting, settled=False)
    exchange = early.exchange(operation, nbytes, waits=True)
    # So long a rank has not run when its turn comes. If that is long, a free core takes it over.
    waited = (early.sharing().on_a_core - 1.0) * exchange.busy_s
    if waited >= MOVED_AFTER_S:
        early, exchange = setting, setting.exchange(operation, nbytes, waits=True)
    return run_step(Compute(0.0, 0.0, 0.0), [exchange], early.sharing()).seconds


def fsdp_units(model: Model) -> list[int]:
    """Elements of each unit, in the order of forward."""
    spans = model.blocks or ((0, len(model.parameters)),)
    return [sum(p.count for p in model.parameters[first:last]) for first, last in spans]


def fsdp_step(setting: Setting, model: Model, compute: Compute, precision: Precision) -> Step:
    """The next unit is gathered while one computes; its gradients leave while the next does."""
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
    # Engines that share the cores slow computing by what they take of them.
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
    return Step(end, talking, min(exposed, talking), slowed)


def tensor_pipeline_step(
    setting: Setting, model: Model, compute: Compute, batch: int, precision: Precision,
    tensor: int, pipeline: int,
) -> Step:  # fmt: skip
    """Microbatches of one sample. Each layer all-reduces its activations twice forward and twice
    backward among `tensor` ranks; stages hand them on; replicas all-reduce gradients at the end."""
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
    # One microbatch is 1/batch of what `compute` is for, and each rank has 1/(tp x pp) of it.
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
    return Step(total, talking, talking, 0.0)
