"""Files of a published format as a dataset of a vault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sealring.errors import ConfigurationError
from sealring.vault.datasets.building import Built, Plan, build
from sealring.vault.datasets.formats import FORMATS, format_of
from sealring.vault.datasets.running import Run
from sealring.vault.datasets.sources import Limits, source_files
from sealring.vault.datasets.stages import canonical
from sealring.vault.objects import check_name
from sealring.vault.sealed import SUITES
from sealring.vault.vault import Vault


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
    progress: Callable[[int], None] = lambda count: None,
    expect: Callable[[int], None] = lambda total: None,
) -> Built:
    """Seals the source as the next version of a dataset; nothing is done if it is the newest.

    `expect` is called with the number of bytes of the source.
    """
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
    expect(sum(unit.bytes for unit in units))
    recipe = canonical({"ingest": kind, "fields": [asdict(field) for field in fields]})
    orders = [
        {
            "do": "ingest",
            "format": kind,
            "fields": [asdict(field) for field in fields],
            "limits": asdict(limits),
            "unit": unit.order,
        }
        for unit in units
    ]
    return build(vault, Plan(name, fields, recipe, [], orders), suite, run, progress)
