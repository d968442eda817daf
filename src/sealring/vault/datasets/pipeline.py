"""Datasets made from datasets, stage by stage: raw, cleaned, tokenised.

A shard of a stage is made from one shard of its input. So a changed input, another code or other
parameters make those shards anew that depend on them, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from sealring.errors import BadSource, ConfigurationError, NoSuchObject, NotAVault
from sealring.formats.strict import read_json
from sealring.vault.datasets.building import Built, Plan, build
from sealring.vault.datasets.index import Index, Input, Shard, index_of
from sealring.vault.datasets.running import Run
from sealring.vault.datasets.stages import Stage, module_of, recorded
from sealring.vault.objects import Part, check_name
from sealring.vault.vault import Stored, Vault

STAGES: Final = "STAGES"


def stages_of(path: Path) -> list[Stage]:
    """The list STAGES of a Python file, which is run."""
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
    """Each behind the one that it is made of."""
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
    progress: Callable[[str, int], None] = lambda name, count: None,
    expect: Callable[[str, int], None] = lambda name, total: None,
) -> Iterator[Built]:
    """Makes what is not there yet, and says of each stage what it did."""
    for stage in arranged(stages):
        try:
            stored = vault.find(stage.of)
        except NoSuchObject:
            raise NoSuchObject(
                f"the stage {stage.name!r} is made of {stage.of!r}, which is not in {vault.path}: "
                "ingest it, or add the stage that makes it"
            ) from None
        index = index_of(stored)
        expect(stage.name, index.bytes)
        plan = _plan(stage, stored, index)
        yield build(vault, plan, suite, run, lambda count, name=stage.name: progress(name, count))  # type: ignore[misc]


def _plan(stage: Stage, stored: Stored, index: Index) -> Plan:
    record = recorded(stage, index.fields)
    inputs = [Input(stage.of, stored.manifest.object_version, index.digest)]
    order = {"do": "stage", "stage": asdict(record)}

    def reads(number: int) -> tuple[Stored, Part, Shard]:
        return stored, stored.manifest.parts[number], index.shards[number]

    def source(number: int) -> str:
        return index.shards[number].digest

    orders: list[dict[str, Any]] = [order] * len(index.shards)
    return Plan(stage.name, record.fields, record.recipe, inputs, orders, reads, source)


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
    """The digest of what each shard was made from."""


def lineage(vault: Vault, name: str, version: int | None = None) -> Iterator[Ancestor]:
    """The dataset, and those that it was made from, back to what was ingested; each of them once.

    Somebody else may have sealed them: two may name each other, or one of them a name many times.
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
    """How it was made, in one of the two forms that this package writes."""
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
