"""The demo's workers: they train, train under a wiretap or an attack, and train recorded.

The training text is the sources of the Python standard library, which every machine has.
"""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
import sysconfig
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from sealring.core.identity import load_credentials
from sealring.errors import ConfigurationError, GroupError, named
from sealring.formats.log.notes import Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.lab.bench.models import ModelShape, make_model
from sealring.lab.bench.workers import Report, run_workers
from sealring.lab.demo.wiretap import Address, LyingStore
from sealring.record.audit.audit import audit
from sealring.record.audit.page import Beside, write_page
from sealring.record.audit.records import AuditTrust

CORPUS_BYTES: Final = 4 << 20
_NOT_THE_LIBRARY: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)


def standard_library(limit: int = CORPUS_BYTES, root: Path | None = None) -> bytes:
    """The first `limit` bytes of all modules, in the order of their paths."""
    root = root or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _modules(root):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise ConfigurationError(
            f"the demo reads Python's own sources, and there are none in {root}: install Python "
            "with its standard library as source files"
        )
    return bytes(text[:limit])


def _modules(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # os.walk visits the folders that remain in this list, in this order.
        folders[:] = sorted(name for name in folders if name not in _NOT_THE_LIBRARY)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


class Batches:
    """Random windows of the text, which depend only on the seed."""

    def __init__(self, text: bytes, *, context: int, size: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._context = context
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Returns (inputs, targets). Each target is the byte that follows its input."""
        starts = torch.randint(
            len(self._text) - self._context, (self._size, 1), generator=self._generator
        )
        windows = self._text[starts + torch.arange(self._context + 1)]
        return windows[:, :-1], windows[:, 1:]


# ---- the workers


Backend = Literal["sealring", "gloo"]
SEED: Final = 1234
LEARNING_RATE: Final = 1e-3
TAPPED_STEPS: Final = 3
ATTACKED_STEPS: Final = 6
"""The run ends after so many steps even if the attack is not noticed."""
_TIMEOUT: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    ranks: int
    steps: int
    batch: int
    """Windows per rank and step."""
    shape: ModelShape
    store: Address
    """The attacker's rendezvous store, for the runs after the first."""
    tap: Address
    """The relay that listens."""
    attack: Address
    """The relay that also flips a bit."""

    @property
    def listener(self) -> int:
        """The rank that is dialed on the tapped link. In the ring it sends to the lured rank."""
        return self.ranks // 2 - 1

    @property
    def lured(self) -> int:
        """The rank that dials, and reaches the wiretap instead."""
        return self.listener + 1


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step on one rank."""

    backend: Backend
    number: int
    loss: float
    seconds: float
    sealed_bytes: int


@dataclass(frozen=True, slots=True)
class Act:
    """Reported when a rank begins the run of this name."""

    name: Literal["training", "wiretap", "attack"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The buckets of the last tapped step on the sending rank, before sealing."""

    own: list[bytes] = field(default_factory=list)
    summed: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the attacked run ended on one rank."""

    whole_steps: int
    raised: str | None
    """The class of the exception that the training step raised; None if it raised none."""
    error: str | None
    """The code of the group's error."""
    message: str
    reported_by: int | None
    at: float
    weights: str
    weights_before: str
    """The digests of the weights after the error, and after the last complete step."""


@dataclass
class Trainee:
    """A model, its optimizer, and the DDP that reduces its gradients."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wrapped: DistributedDataParallel

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | None = None) -> Trainee:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        return cls(model, optimizer, DistributedDataParallel(model, process_group=group))

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = self.wrapped(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def digest(self) -> str:
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().numpy().tobytes())
        return state.hexdigest()


def work(rank: int, report: Report, plan: TrainingPlan) -> None:
    """Runs one worker, from its start to its end. Each run has its own group."""
    batches = Batches(
        standard_library(), context=plan.shape.context, size=plan.batch, seed=SEED + rank
    )
    model = make_model(plan.shape, SEED)
    report(Act("training"))
    _train(report, plan, model, batches)
    # The attacker's relay needs TCP.
    os.environ["SEALRING_TRANSPORT"] = "tcp"
    report(Act("wiretap"))
    _train_tapped(rank, report, plan, model, batches)
    report(Act("attack"))
    _train_attacked(rank, report, plan, model, batches)


def _train(report: Report, plan: TrainingPlan, model: nn.Module, batches: Batches) -> None:
    """Trains two models with the same weights and batches, one over sealring, one over Gloo.

    Their steps alternate, so that other load on the machine slows both equally.
    """
    dist.init_process_group("sealring")
    gloo = dist.new_group(backend="gloo")
    trainees: dict[Backend, Trainee] = {
        "sealring": Trainee.of(model),
        "gloo": Trainee.of(copy.deepcopy(model), gloo),
    }
    for number in range(plan.steps):
        batch = batches.draw()
        for backend in _in_turn(trainees, number):
            dist.barrier()
            before, start = _sealed_bytes(), time.perf_counter()
            loss = trainees[backend].step(batch)
            seconds = time.perf_counter() - start
            report(TrainingStep(backend, number, loss, seconds, _sealed_bytes() - before))
    dist.barrier()
    dist.destroy_process_group()


def _in_turn(trainees: Mapping[Backend, Trainee], number: int) -> list[Backend]:
    """Alternates which backend goes first, because the order affects the caches."""
    names = list(trainees)
    return names if number % 2 == 0 else names[::-1]


def _sealed_bytes() -> int:
    group: Any = dist.group.WORLD
    return int(group.account()["sealed_bytes"])


def _train_tapped(
    rank: int, report: Report, plan: TrainingPlan, model: nn.Module, batches: Batches
) -> None:
    _join_over_the_attackers_store(rank, plan, plan.tap)
    trainee = Trainee.of(model)
    gradients = Gradients()

    def all_reduce(taken: Gradients, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Does what DDP does by default, and copies the input and the result."""
        values = bucket.buffer().div_(plan.ranks)
        taken.own.append(values.numpy().tobytes())
        work: Any = dist.all_reduce(values, async_op=True)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            (summed,) = future.value()
            taken.summed.append(summed.numpy().tobytes())
            return summed

        future: torch.futures.Future[Tensor] = work.get_future().then(done)
        return future

    if rank == plan.listener:
        # DDP checks a hook's annotations, and here they are strings. A lambda has none.
        trainee.wrapped.register_comm_hook(
            gradients, lambda taken, bucket: all_reduce(taken, bucket)
        )
    for _ in range(TAPPED_STEPS):
        gradients.own.clear()
        gradients.summed.clear()
        trainee.step(batches.draw())
    dist.barrier()
    dist.destroy_process_group()
    if rank == plan.listener:
        report(gradients)


def _train_attacked(
    rank: int, report: Report, plan: TrainingPlan, model: nn.Module, batches: Batches
) -> None:
    _join_over_the_attackers_store(rank, plan, plan.attack)
    trainee = Trainee.of(model)
    whole_steps, before = 0, trainee.digest()
    ending: Ending | None = None
    try:
        while whole_steps < ATTACKED_STEPS:
            trainee.step(batches.draw())
            whole_steps, before = whole_steps + 1, trainee.digest()
    except RuntimeError as error:
        at = time.monotonic()
        ending = _ending(whole_steps, before, trainee.digest(), error, at)
    report(ending or _ending(whole_steps, before, trainee.digest()))
    dist.destroy_process_group()


def _ending(
    whole_steps: int,
    weights_before: str,
    weights: str,
    raised: RuntimeError | None = None,
    at: float = 0.0,
) -> Ending:
    failure = None if raised is None else _error_of_the_group(raised)
    return Ending(
        whole_steps=whole_steps,
        raised=None if raised is None else named(raised),
        error=None if failure is None else failure.code,
        message=str(failure or raised or ""),
        reported_by=None if failure is None else failure.reported_by,
        at=at,
        weights=weights,
        weights_before=weights_before,
    )


def _error_of_the_group(raised: RuntimeError) -> GroupError | None:
    """The group's error as an object, even if DDP raised only its text."""
    if isinstance(raised, GroupError):
        return raised
    try:
        dist.barrier()  # a failed group raises its error at every later call
    except GroupError as error:
        return error
    return None


def _join_over_the_attackers_store(rank: int, plan: TrainingPlan, relay: Address) -> None:
    store: Store = TCPStore(*plan.store, is_master=False, timeout=_TIMEOUT)
    if rank == plan.lured:
        store = LyingStore(store, about=plan.listener, relay=relay)
    dist.init_process_group(
        "sealring", store=store, rank=rank, world_size=plan.ranks, timeout=_TIMEOUT
    )


# ---- the last part: recorded runs from a sealed vault, and their audits
#
# The text is sealed in a vault. All workers train from it with signed records and save a
# checkpoint. Half of them load it and continue, as a separate run. In a third run one rank signs a
# false count of its all-reduces. The audit checks each run's folder by itself.


TEXT: Final = "corpus"
CHECKPOINT: Final = "model"
STEPS: Final = 8
EVERY: Final = 4
_JOB: Final = "local"

Name = Literal["honest", "resumed", "lying"]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    folder: str
    """The folder of the run's records."""
    vault: str
    key: str
    resumes: bool
    lies: bool
    digest: str
    """The digest of the text."""


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """A run, and the result of its audit."""

    name: Name
    ranks: int
    status: int
    """The exit status of `sealring audit check`."""
    findings: list[str]
    page: Path


def perform_recorded(ranks: int, place: Path, costs: Beside) -> Generator[str | AuditedRun]:
    """Performs the recorded runs; yields progress texts, and the outcome of each audit.

    All files are kept in `place`. `costs` is shown on each page.
    """
    from sealring.vault.keys import key_file, make_key_file
    from sealring.vault.trees import seal_path
    from sealring.vault.vault import Vault

    yield "sealing the text into a vault"
    text = standard_library(1 << 20)
    make_key_file(place / "vault.key")
    vault = Vault.create(place / "vault", key_file(place / "vault.key"), "owner")
    with tempfile.TemporaryDirectory(dir=place) as plain:
        path = Path(plain) / TEXT
        path.write_bytes(text)
        seal_path(vault, path, TEXT, None, lambda _: None)
    digest = hashlib.sha256(text).hexdigest()
    environment = {"SEALRING_SECRET": secrets.token_hex(32), "SEALRING_JOB": _JOB}
    (authority,) = load_credentials(0, ranks, environment).authorities
    (place / "authority.pem").write_bytes(authority.public_bytes(Encoding.PEM))
    # The lying run has three ranks: of two that contradict each other, either could be lying.
    fewer = max(2, ranks // 2)
    runs: list[tuple[Name, int]] = [("honest", ranks), ("resumed", fewer), ("lying", 3)]
    for name, count in runs:
        yield f"a recorded run with {count} workers ({name})"
        folder = place / name
        plan = RecordedRun(
            str(folder), str(vault.path), str(place / "vault.key"),
            resumes=name == "resumed", lies=name == "lying", digest=digest,
        )  # fmt: skip
        for _ in run_workers(count, _work, plan, environment=environment):
            pass
        yield f"the audit of it ({name})"
        result = audit(folder, _trust(folder, authority))
        page = place / f"{name}.html"
        write_page(page, result, costs)
        findings = [f"{' or '.join(one.parties)}: {one.text}" for one in result.findings]
        yield AuditedRun(name, count, result.status.value, findings, page)


def _trust(folder: Path, authority: x509.Certificate) -> AuditTrust:
    """The two things that an auditor must trust: the job's authority, and the key of the log."""
    vkey = folder.with_name(f"{folder.name}.vkey").read_text().strip()
    return AuditTrust([authority], LogPolicy((Log(Verifier.parse(vkey)),)))


def surprises(audited: list[AuditedRun]) -> list[str]:
    """Unexpected results of the audits; empty if all is well."""
    found = []
    for one in audited:
        blamed = any(finding.startswith("rank 1") for finding in one.findings)
        if one.name == "lying" and not (one.status == 1 and blamed):
            found.append(f"the audit did not name the rank that lied, but said {one.findings}")
        if one.name != "lying" and one.status != 0:
            found.append(f"the audit of the {one.name} run says {one.findings}")
    return found


# ---- in the workers


def _work(rank: int, report: Report, plan: RecordedRun) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from sealring.lab.bench.models import ModelShape, make_model
    from sealring.record import Share, note_data
    from sealring.record.recording.run import record_run
    from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file

    vault = Vault.open(Path(plan.vault), key_file(Path(plan.key)))
    shape = ModelShape(layers=1, width=32, heads=2, context=32)
    batches = Batches(_opened(vault), context=shape.context, size=2, seed=SEED + rank)
    dist.init_process_group("sealring")
    world = dist.get_world_size()
    trainee = Trainee.of(make_model(shape, SEED))
    if plan.lies and rank == 1:
        _lie()
    with record_run(plan.folder, every=EVERY, rank=rank, world=world) as records:
        if plan.resumes:
            state = {"model": trainee.model.state_dict()}
            dcp.load(state, storage_reader=CheckpointReader(vault, CHECKPOINT))
            trainee.model.load_state_dict(state["model"])
        for step in records.steps(STEPS):
            trainee.step(batches.draw())
            first = step * world * 2
            share = Share(world * 2, rank * 2, 2)
            note_data(TEXT, plan.digest, 0, first, first + world * 2, seed=SEED, share=share)
        dcp.save(
            {"model": trainee.model.state_dict()},
            storage_writer=CheckpointWriter(vault, CHECKPOINT),
        )
        dist.destroy_process_group()
    report(None)


def _opened(vault: Any) -> bytes:
    """Opens the text from the vault. No disk holds its plaintext."""
    stored = vault.find(TEXT)
    (part,) = stored.manifest.parts
    with stored.copy.opened(part, stored.whose) as reader:
        text = bytearray(reader.length)
        reader.read_into(0, text)
    return bytes(text)


def _lie() -> None:
    """Makes this rank state one collective more than it has done."""
    from sealring.record.recording import run

    recording: Any = run
    honest = recording.traffic_so_far

    def lying() -> Any:
        found = honest()
        found.collectives = [replace(one, count=one.count + 1) for one in found.collectives]
        return found

    recording.traffic_so_far = lying
