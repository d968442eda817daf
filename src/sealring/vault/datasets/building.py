"""Makes a dataset's shards: each once, in several processes, and going on after a kill.

A shard is written under a temporary name. When it is complete it gets its part's name, and a sealed
receipt is written beside it. The manifest, written last, makes the version complete. A build that
is started again keeps the shards that have a receipt, and copies those of the previous version
whose source is the same.

The source is files of a published format, or another dataset that a stage reads. A stage makes each
of its shards from one shard of its input. So if inputs, code or parameters change, only the shards
that depend on them are made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from sealring.errors import (
    BadSource,
    ConfigurationError,
    NoSuchObject,
    NotAVault,
    VaultBusy,
    VaultError,
)
from sealring.formats.files import sync_directory
from sealring.formats.strict import read_json, strictly
from sealring.vault import objects
from sealring.vault.datasets.fields import Field
from sealring.vault.datasets.formats import FORMATS, Limits, format_of, source_files
from sealring.vault.datasets.shards import (
    KIND,
    SHARD_HASH,
    VERSION,
    Index,
    Input,
    Shard,
    Written,
    index_of,
    sealed_shard,
)
from sealring.vault.datasets.stages import Stage, canonical, module_of, recorded
from sealring.vault.datasets.work import Run, Task
from sealring.vault.files import remove_directory, write_file
from sealring.vault.objects import COPY_NAME, Copy, Part, check_name
from sealring.vault.sealed import SUITES, Progress, read_small
from sealring.vault.vault import Stored, Vault

_RECEIPT: Final = ".receipt"
STAGES: Final = "STAGES"


@dataclass(frozen=True, slots=True)
class Planned:
    """One shard to make."""

    order: dict[str, Any]
    """The order for `carry_out`, without the place to write to, which `_task` adds."""
    reads: tuple[Stored, Part, Shard] | None = None
    """The shard of another dataset from which this shard is made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A dataset to make."""

    name: str
    fields: list[Field]
    recipe: str
    inputs: list[Input]
    shards: list[Planned]


@dataclass(frozen=True, slots=True)
class Built:
    name: str
    version: int
    digest: str
    shards: int
    samples: int
    bytes: int
    made: int
    """The number of shards that were made now. The others existed already."""
    changed: bool
    """Whether there is a new version."""


@dataclass(frozen=True, slots=True)
class Receipt:
    recipe: str
    """The recipe's digest."""
    commitment: str
    shard: Shard


def build(vault: Vault, plan: Plan, suite: str | None, run: Run, progress: Progress) -> Built:
    """Makes the next version, unless the newest has the same recipe, sources and suite."""
    _ = vault.path.local  # Unsupported in a store
    vault.require_writer()
    with contextlib.ExitStack() as stack:
        left = _left_behind(vault, plan, stack)
        stack.enter_context(vault.held(alone=False))
        vault.refresh()
        before = _before(vault, plan.name)
        suite = suite or (before[0].copy.place.suite if before else vault.header.suite)
        same = before is not None and before[1].recipe == plan.recipe
        # The units' sources are needed only if some shards may exist already.
        sources = _sources(plan, run, progress) if same or left else None
        if before and same and _is_newest(plan, before, sources, suite):
            return _built(plan.name, before[0].manifest.object_version, before[1], 0, False)
        copy = left if left and left.place.suite == suite else vault.new_version(plan.name, suite)
        stack.enter_context(copy.folder.claim())
        done = _receipts(copy, plan, sources)
        known = _known(before[1], sources) if before and same else {}
        tasks = [
            _task(plan, number, copy, before[0] if before else None, known.get(number))
            for number in range(len(plan.shards))
            if number not in done
        ]
        for number, written in run(tasks, progress):
            done[number] = _keep(copy, plan, number, written)
        index = Index(VERSION, plan.fields, plan.recipe, plan.inputs,
                      [done[number].shard for number in range(len(plan.shards))])  # fmt: skip
        parts = [
            Part(shard.part, shard.length, done[number].commitment, SHARD_HASH, shard.digest)
            for number, shard in enumerate(index.shards)
        ]
        vault.commit(copy, KIND, plan.name, parts, index.text())
        for shard in index.shards:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy.folder.local / (shard.part + _RECEIPT))
        made = sum(task.order["do"] != "copy" for task in tasks)
        return _built(plan.name, copy.place.version, index, made, True)


Bar = Callable[[str], AbstractContextManager[tuple[Progress, Progress]]]
"""Shows the progress of the named work. It gives two functions: one for the total number of bytes,
one for bytes just done."""


def no_bar(what: str) -> AbstractContextManager[tuple[Progress, Progress]]:
    return contextlib.nullcontext((lambda total: None, lambda count: None))


def part_name(number: int) -> str:
    return f"shard-{number:08}"


def _built(name: str, version: int, index: Index, made: int, changed: bool) -> Built:
    return Built(
        name, version, index.digest, len(index.shards), index.samples, index.bytes, made, changed
    )


def _before(vault: Vault, name: str) -> tuple[Stored, Index] | None:
    try:
        stored = vault.find(name)
    except NoSuchObject:
        return None
    if stored.manifest.kind != KIND:
        raise ConfigurationError(
            f"{name!r} is a {stored.manifest.kind} in this vault: choose another name for the "
            "dataset"
        )
    return stored, index_of(stored)


def _left_behind(vault: Vault, plan: Plan, stack: contextlib.ExitStack) -> Copy | None:
    """The copy that a killed build of this name has left, if this build can continue it.

    Looks only if no other process uses the vault: then that build has certainly ended.
    """
    found: Copy | None = None
    with contextlib.suppress(VaultBusy), vault.held(alone=True, wait=False):
        vault.refresh()
        newest = _before(vault, plan.name)
        last = newest[0].manifest.object_version if newest else 0
        for version in vault.incomplete(plan.name):
            for folder in version.entries(COPY_NAME):
                with contextlib.suppress(VaultError):
                    copy = objects.open_copy(folder, vault.ring, vault.header.vault)
                    # A revoked holder may know a copy's key that an older vault key wraps.
                    vault.require_key(copy.vault_key, plan.name)
                    if (
                        found is None
                        and int(version.name) > last
                        and not folder.claimed(superseded=False)
                    ):
                        found = copy
                        stack.enter_context(folder.claim())
            if found is None or found.folder.parent != version:
                vault.remove_version(version)
    return found


def _sources(plan: Plan, run: Run, progress: Progress) -> list[str]:
    # The index has the digest of another dataset's shard, so no shard is read.
    known = [one.reads[2].digest if one.reads else None for one in plan.shards]
    tasks = [
        Task(number, {**plan.shards[number].order, "do": "digest", "part": part_name(number)}, [])
        for number, digest in enumerate(known)
        if digest is None
    ]
    found = dict(run(tasks, lambda count: None))
    return [digest or str(found[number]) for number, digest in enumerate(known)]


def _is_newest(
    plan: Plan, before: tuple[Stored, Index], sources: list[str] | None, suite: str
) -> bool:
    stored, index = before
    return (
        [shard.source for shard in index.shards] == sources
        and [one.digest for one in index.inputs] == [one.digest for one in plan.inputs]
        and stored.copy.place.suite == suite
    )


def _known(before: Index, sources: list[str] | None) -> dict[int, Shard]:
    """The previous version's shards with an equal source, by the numbers of the new shards."""
    shards = {shard.source: shard for shard in before.shards}
    return {
        number: shards[source] for number, source in enumerate(sources or []) if source in shards
    }


def _receipts(copy: Copy, plan: Plan, sources: list[str] | None) -> dict[int, Receipt]:
    """The receipts of shards that are complete and wanted. Removes all other files."""
    found: dict[int, Receipt] = {}
    wanted = hashlib.sha256(plan.recipe.encode()).hexdigest()
    for number, source in enumerate(sources or []):
        part = part_name(number)
        with contextlib.suppress(VaultError, ConfigurationError, ValueError):
            sealed = read_small(copy.folder.local / (part + _RECEIPT), "the receipt")
            document = read_json(copy.place.open(part + _RECEIPT, sealed, f"the receipt of {part}"))
            receipt: Receipt = strictly(Receipt, document, part, "receipt")
            if receipt.recipe == wanted and receipt.shard.source == source:
                shard = receipt.shard
                listed = Part(part, shard.length, receipt.commitment, SHARD_HASH, shard.digest)
                with copy.opened(listed, plan.name):
                    found[number] = receipt
    keep = {part_name(number) for number in found}
    keep |= {part + _RECEIPT for part in keep} | {objects.KEY_FILE}
    for name in os.listdir(copy.folder.local):
        if name not in keep:
            try:
                os.unlink(copy.folder.local / name)
            except IsADirectoryError:  # a build makes no directories
                remove_directory(copy.folder.local, copy.folder.local / name)
    return found


def _task(plan: Plan, number: int, copy: Copy, before: Stored | None, known: Shard | None) -> Task:
    part = part_name(number)
    order = {
        **plan.shards[number].order,
        "part": part,
        "folder": str(copy.folder),
        "place": asdict(copy.place.of(part)),
    }
    keys = [copy.place.part_key(part)]
    reads = plan.shards[number].reads
    if known is not None and before is not None:
        (listed,) = (one for one in before.manifest.parts if one.name == known.part)
        reads = before, listed, known
        order["do"] = "copy"
    if reads is not None:
        stored, listed, shard = reads
        order["input_path"] = str(stored.copy.folder / listed.name)
        order["input"] = asdict(sealed_shard(stored, listed, shard))
        keys.append(stored.copy.place.part_key(listed.name))
    return Task(number, order, keys)


def _keep(copy: Copy, plan: Plan, number: int, answer: Any) -> Receipt:
    """Gives a finished shard its name, and writes its receipt."""
    written: Written = strictly(Written, answer, part_name(number), "shard")
    part = part_name(number)
    folder = copy.folder.local
    os.replace(folder / os.path.basename(written.file), folder / part)
    sync_directory(folder)
    recipe = hashlib.sha256(plan.recipe.encode()).hexdigest()
    receipt = Receipt(recipe, written.commitment, written.shard)
    text = json.dumps(asdict(receipt)).encode()
    write_file(folder / (part + _RECEIPT), copy.place.seal(part + _RECEIPT, text))
    return receipt


def ingest(
    vault: Vault,
    source: Path,
    name: str,
    run: Run,
    *,
    form: str | None = None,
    dtype: str | None = None,
    suite: str | None = None,
    limits: Limits | None = None,
    bar: Bar = no_bar,
) -> Built:
    """Seals the source as the next version of a dataset, unless the newest is made from it."""
    check_name(name)
    if suite is not None and suite not in SUITES:
        raise ConfigurationError(f"the suite {suite!r} is none of {', '.join(SUITES)}")
    limits = limits or Limits()
    if limits.shard < 1 or limits.sample < 1:
        raise ConfigurationError("a shard and a sample have at least one byte")
    files = source_files(source)
    kind = format_of(files, form)
    fields = FORMATS[kind].fields(files, dtype)
    units = list(FORMATS[kind].units(files, limits, dtype))
    recipe = canonical({"ingest": kind, "fields": [asdict(field) for field in fields]})
    order = {
        "do": "ingest",
        "format": kind,
        "fields": [asdict(field) for field in fields],
        "limits": asdict(limits),
    }
    shards = [Planned(order | {"unit": unit.order}) for unit in units]
    with bar(f"sealing {name}") as (expect, progress):
        expect(sum(unit.bytes for unit in units))
        return build(vault, Plan(name, fields, recipe, [], shards), suite, run, progress)


def stages_of(path: Path) -> list[Stage]:
    """Runs a Python file and returns its list STAGES."""
    try:
        code = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}") from None
    try:
        found = getattr(module_of(code, str(path)), STAGES, None)
    except ConfigurationError:
        raise
    except Exception as problem:
        raise BadSource(f"{path} does not run: {problem!r}", code="vault.stage_failed") from problem
    if not isinstance(found, list) or not all(isinstance(one, Stage) for one in found):
        raise ConfigurationError(f"{path} has no list {STAGES} of sealring.vault.Stage")
    return found


def arranged(stages: Sequence[Stage]) -> list[Stage]:
    """Sorts stages so that each comes after the stage that makes its input."""
    by_name = {stage.name: stage for stage in stages}
    if len(by_name) != len(stages):
        raise ConfigurationError("two stages have one name")
    try:
        order = list(TopologicalSorter({one.name: [one.of] for one in stages}).static_order())
    except CycleError as problem:
        raise ConfigurationError(
            f"stages are made of each other in a circle: {' of '.join(problem.args[1])}"
        ) from None
    return [by_name[name] for name in order if name in by_name]


def run_stages(
    vault: Vault,
    stages: Sequence[Stage],
    run: Run,
    *,
    suite: str | None = None,
    bar: Bar = no_bar,
) -> Iterator[Built]:
    """Runs the stages in order, and yields for each what was built. Makes only what is missing."""
    for stage in arranged(stages):
        try:
            stored = vault.find(stage.of)
        except NoSuchObject:
            raise NoSuchObject(
                f"the stage {stage.name!r} is made of {stage.of!r}, which is not in {vault.path}: "
                "ingest it, or add the stage that makes it"
            ) from None
        index = index_of(stored)
        with bar(f"making {stage.name}") as (expect, progress):
            expect(index.bytes)
            built = build(vault, _plan(stage, stored, index), suite, run, progress)
        yield built


def _plan(stage: Stage, stored: Stored, index: Index) -> Plan:
    record = recorded(stage, index.fields)
    inputs = [Input(stage.of, stored.manifest.object_version, index.digest)]
    order = {"do": "stage", "stage": asdict(record)}
    listed = zip(stored.manifest.parts, index.shards, strict=True)
    shards = [Planned(order, (stored, part, shard)) for part, shard in listed]
    return Plan(stage.name, record.fields, record.recipe, inputs, shards)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A dataset, and how it was made."""

    name: str
    version: int
    digest: str
    samples: int
    recipe: dict[str, Any]
    inputs: list[Input]
    sources: list[str]
    """The digests of the shards' sources."""


def lineage(vault: Vault, name: str, version: int | None = None) -> Iterator[Ancestor]:
    """Yields a dataset and all datasets that it was made from, back to the ingested ones.

    Each comes once. Others may have sealed them: two datasets may even name each other as inputs.
    """
    waiting: list[tuple[str, int | None]] = [(name, version)]
    seen: set[tuple[str, int]] = set()
    while waiting:
        stored = vault.find(*waiting.pop(0))
        which = stored.manifest.name, stored.manifest.object_version
        if which in seen:
            continue
        seen.add(which)
        index = index_of(stored)
        sources = [shard.source for shard in index.shards]
        recipe = _recipe(index, stored.whose)
        yield Ancestor(*which, index.digest, index.samples, recipe, index.inputs, sources)
        waiting[:0] = dict.fromkeys((one.name, one.version) for one in index.inputs)


def _recipe(index: Index, whose: str) -> dict[str, Any]:
    """The recipe of a dataset. Raises NotAVault if it has no form that this package writes."""
    try:
        recipe: Any = read_json(index.recipe.encode())
        if "ingest" in recipe:
            texts = [recipe["ingest"]]
        else:
            texts = [recipe["stage"], recipe["code"]["sha256"], *recipe["parameters"].keys()]
        if not all(isinstance(one, str) and one.isprintable() for one in texts):
            raise ValueError("it has names that cannot be printed")
        for one in index.inputs:
            check_name(one.name)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigurationError) as problem:
        raise NotAVault(
            f"the index of {whose} does not say how it was made: {type(problem).__name__}"
        ) from None
    assert isinstance(recipe, dict)
    return recipe
