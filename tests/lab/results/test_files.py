"""A results file is written whole or not at all, and no other file is read as one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import ConfigurationError
from sealring.lab.results import (
    Results,
    from_json,
    read_results,
    spread_of,
    this_machine,
    to_json,
    write_results,
)
from tests.lab.results.examples import results


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, results())
    assert read_results(path) == results()
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_results_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, results())
    one = results().step[0]
    bad = dataclasses.replace(results(), step=[dataclasses.replace(one, seconds=[float("nan")])])
    with pytest.raises(ConfigurationError, match=r"step\[0\]: seconds\[0\] is not what"):
        write_results(path, bad)
    assert read_results(path) == results()


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "results.json"
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        write_results(path, results())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.99])
def test_a_file_cut_short_is_called_that(kept: float, tmp_path: Path) -> None:
    text = to_json(results())
    path = tmp_path / "results.json"
    path.write_text(text[: int(len(text) * kept)])
    with pytest.raises(ConfigurationError, match=r"results\.json is cut short: .*bench all"):
        read_results(path)


def test_another_version_is_named() -> None:
    text = to_json(results()).replace('"version": 4', '"version": 7', 1)
    with pytest.raises(ConfigurationError, match="of version 7, and this sealring reads 4"):
        from_json(text, "old.json")


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(to_json(results()))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.pop("machine"), "file"),
        (lambda d: d.update(more=1), "file"),
        (lambda d: d.update(complete="yes"), "complete"),
        (lambda d: d["machine"].update(cores=-2), "machine: cores"),
        (lambda d: d["aead"][0].update(kernel="null"), r"aead\[0\]: kernel"),
        (lambda d: d["aead"][0]["seconds"].append("1"), r"aead\[0\]: seconds\[2\]"),
        (lambda d: d["link"][0]["points"][0].update(bytes=1.5), r"link\[0\]: points\[0\]: bytes"),
        (lambda d: d["link"][0].update(fit=3), r"link\[0\]: fit"),
        (lambda d: d["step"][0].update(variant="null"), r"step\[0\]: variant"),
        (lambda d: d.update(step={}), "step"),
    ],
)
def test_a_field_of_another_type_is_named(change: Callable[[Any], object], where: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{where} is not what a results file has there"):
        from_json(edited(change), "file")


@pytest.mark.parametrize("text", ["", "hello", "[1, 2]", "{}", '{"format": "another"}', "[" * 9999])
def test_what_is_no_results_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no (bench )?results"):
        from_json(text, "file")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read: No such file.*bench all"):
        read_results(tmp_path / "results.json")


def test_a_run_that_was_stopped_says_so() -> None:
    part = dataclasses.replace(results(), complete=False, stopped="Ctrl-C after 3 of 9 cases")
    read = from_json(to_json(part), "part")
    assert isinstance(read, Results)
    assert (read.complete, read.stopped) == (False, "Ctrl-C after 3 of 9 cases")


def test_medians_and_spreads() -> None:
    assert spread_of([2.0]) == 0.0
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == 0.5


def test_this_machine_is_described_without_its_name() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.openssl.startswith("OpenSSL 3")
    import socket

    assert socket.gethostname() not in json.dumps(dataclasses.asdict(machine))
