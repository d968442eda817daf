"""The public interface is locked: its names and signatures are those of public_api.txt.

A change of the interface is a decision. `python -m tests.test_public_api` writes the file again;
the change then shows in the diff and belongs in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sealring
import sealring.attest.broker
import sealring.core.registration
import sealring.errors
import sealring.observe
import sealring.record
import sealring.train.integrations
import sealring.train.offload
import sealring.vault

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).parent / "public_api.txt"
GROUP = ("abort", "account", "monitored_barrier", "recorder", "set_timeout", "shutdown", "topology")
RECORDER = ("account", "collective")
RECORDING = (
    "close", "configure", "flush", "next_step", "note_privacy", "path", "replay", "resume_at",
    "step", "steps", "wait",
)  # fmt: skip


def lines() -> Iterator[str]:
    for name in sealring.__all__:
        value = getattr(sealring, name)
        if inspect.isfunction(value):
            yield described("sealring", name, value)
        else:
            yield f"sealring.{name}"
    for name in GROUP:
        yield member("sealring.SealedProcessGroup", sealring.SealedProcessGroup, name)
    for name in sealring.vault.__all__:
        yield described("sealring.vault", name, getattr(sealring.vault, name))
    for name in sealring.train.offload.__all__:
        yield described("sealring.train.offload", name, getattr(sealring.train.offload, name))
    for name in sealring.train.integrations.__all__:
        yield described(
            "sealring.train.integrations", name, getattr(sealring.train.integrations, name)
        )
    for name in sealring.record.__all__:
        yield described("sealring.record", name, getattr(sealring.record, name))
    for name in RECORDING:
        yield member("sealring.record.Recording", sealring.record.Recording, name)
    yield described("sealring.attest.broker", "data_key", sealring.attest.broker.data_key)
    yield described("sealring.core.registration", "register", sealring.core.registration.register)
    for name in sealring.observe.__all__:
        value = getattr(sealring.observe, name)
        if dataclasses.is_dataclass(value):
            fields = ", ".join(f"{one.name}: {one.type}" for one in dataclasses.fields(value))
            yield f"sealring.observe.{name}({fields})"
    for name in RECORDER:
        yield member("sealring.observe.FlightRecorder", sealring.observe.FlightRecorder, name)
    for name, value in sorted(vars(sealring.errors).items()):
        if inspect.isclass(value) and issubclass(value, sealring.errors.SealringError):
            (base,) = value.__bases__
            yield f"sealring.errors.{name}({base.__name__})"
            attributes = inspect.get_annotations(value).items()
            yield from (f"sealring.errors.{name}.{key}: {kind}" for key, kind in attributes)
            if "__init__" in vars(value):
                yield member(f"sealring.errors.{name}", value, "__init__")


def described(where: str, name: str, value: Any) -> str:
    return f"{where}.{name}{inspect.signature(value)}" if callable(value) else f"{where}.{name}"


def member(where: str, owner: type, name: str) -> str:
    value = inspect.getattr_static(owner, name, None)
    if value is None or isinstance(value, property):  # an attribute that is set for each instance
        return f"{where}.{name}"
    return described(where, name, getattr(owner, name))


def test_names_and_signatures_are_the_locked_ones() -> None:
    assert list(lines()) == FILE.read_text().splitlines()


def test_everything_that_the_documents_tell_people_to_use_is_locked() -> None:
    locked = FILE.read_text()
    shown = re.compile(r"\bsealring\.((?:(?:core|record|train)\.)?(?:[a-z]+\.)?[a-zA-Z_]+)\(")
    imported = re.compile(r"from sealring((?:\.core|\.record|\.train)?(?:\.\w+)?) import ([\w, ]+)")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.py")]:
        text = path.read_text()
        for name in shown.findall(text):
            assert f"sealring.{name}" in locked, (path.name, name)
        for module, names in imported.findall(text):
            for name in names.split(","):
                assert f"sealring{module}.{name.strip()}" in locked, (path.name, name)
        for name in re.findall(r"group\.WORLD\.(\w+)", text):
            assert name in GROUP, (path.name, name)


def test_the_reference_lists_what_is_locked() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in sealring.__all__:
        is_error = name in vars(sealring.errors)
        assert is_error or f"sealring.{name}" in page, name
    for module in (
        sealring.observe,
        sealring.record,
        sealring.train.integrations,
        sealring.train.offload,
        sealring.vault,
    ):
        for name in module.__all__:
            # `sealring.record_run` is the same function as `sealring.record.record_run`.
            where = "sealring" if name in sealring.__all__ else module.__name__
            assert re.search(rf":: {re.escape(where)}.{name}\b", page), (module, name)


def test_types_are_shipped_with_the_package() -> None:
    assert (ROOT / "src" / "sealring" / "py.typed").exists()


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
