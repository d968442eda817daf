"""`sealring plan` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sealring.cli import app, main
from sealring.cli.plan import parse_ranks
from sealring.errors import ConfigurationError
from sealring.lab.__main__ import app as lab
from sealring.lab.results import write_results
from tests.lab.plan.measured import results_of
from tests.lab.plan.test_validate import imagined


def planned(*arguments: str) -> str:
    return printed(app, "plan", *arguments)


def of_the_lab(*arguments: str) -> str:
    return printed(lab, *arguments)


def printed(commands: typer.Typer, *arguments: str) -> str:
    done = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_plan_in_json() -> None:
    found = json.loads(planned("gpt2", "--ranks", "4", "--profile", "h100-cc", "--json"))
    assert (found["model"], found["ranks"], found["parameters"]) == ("gpt2", 4, 124_439_808)
    assert [each["way"] for each in found["ways"]] == ["plain", "cc", "sealed"]
    assert found["cost_per_day"] is None


def test_a_plan_in_tables() -> None:
    text = planned("gpt2", "--ranks", "4", "--profile", "h100-cc", "--price", "2")
    text = " ".join(text.split())  # a terminal may be narrow
    for words in ("Predicted, not measured", "DDP by bucket size", "192.00 a day"):
        assert words in text


def test_hosts_and_networks_matter() -> None:
    arguments = ("gpt2", "--ranks", "8", "--profile", "h200-sealring", "--json")
    inside = json.loads(planned(*arguments))
    slow = json.loads(planned(*arguments, "--per-host", "2", "--network", "wan"))
    assert (inside["hosts"], slow["hosts"]) == (1, 4)
    assert slow["ways"][0]["seconds"] > 10 * inside["ways"][0]["seconds"]


def test_a_sweep_draws_the_curve() -> None:
    found = json.loads(planned("gpt2", "--ranks", "2..8", "--json"))
    assert [each["ranks"] for each in found["sweep"]] == [2, 4, 8]
    assert "█" in planned("gpt2", "--ranks", "2,4")


def test_validation_prints_every_case(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = results_of(imagined())
    write_results(path, results)
    found = json.loads(of_the_lab("validate", str(path), "--json"))
    steps = sum(case.variant != "compute" for case in results.step)
    assert len(found["cases"]) == steps + len(results.allreduce)
    assert found["median_error"]["step"] < 0.02
    assert "median error" in of_the_lab("validate", str(path))


def test_a_results_file_is_a_profile_too(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, results_of(imagined()))
    here = ("--profile", str(path))
    found = json.loads(planned("gpt-small", "--ranks", "2", *here, "--json"))
    assert (found["profile"], found["hosts"]) == ("this machine", 1)
    assert found["ways"][0]["compute_s"] == pytest.approx(0.077)  # the measured time
    with pytest.raises(
        ConfigurationError, match=r"of memory on a host, .*: take fewer ranks per h"
    ):
        planned("gpt2-xl", "--ranks", "2", *here)


def test_the_reproduction_stands_beside_what_was_published() -> None:
    text = of_the_lab("reproduce", "2501.11771")
    for words in ("41.6 x", "3.03 x", "nothing fitted"):
        assert words in text
    rows = json.loads(of_the_lab("reproduce", "2501.11771", "--json"))["rows"]
    assert {row["what"]: row["value"] for row in rows}["145 all-reduces: published"] == 41.6


def test_what_there_is_and_where_it_comes_from() -> None:
    listed = json.loads(planned("--list", "--json"))
    assert listed["models"]["gpt2-xl"] == 1_557_611_200
    assert "h100-cc" in listed["profiles"]
    assert "ISPASS" in planned("--sources", "--profile", "h100-cc")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpt9"], "'gpt9' is not a model; there is gpt2,"),
        (["gpt2", "--ranks", "70000"], "70000 ranks: a job has 1 to 65536 of them"),
        (["gpt2-xl", "--ranks", "1", "--batch", "64"], "GB of memory on a GPU, which has"),
        (["gpt2", "--profile", "none.json"], "the results none.json cannot be read"),
        ([], "name a model, e.g."),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sealring", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert said.err.startswith("configuration: ")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpt2", "--precision", "int8"], "must be fp32, bf16 or fp16"),
        (["gpt2", "--compute-ms", "0"], "--compute-ms 0 is no time for a step"),
        (["gpt2", "--profile", "abacus"], "'abacus' is not a profile"),
        (["gpt2", "--network", "pigeon"], "'pigeon' is not a network"),
    ],
)
def test_options_without_sense_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        planned(*arguments)


def test_ranks_double_or_are_listed() -> None:
    assert parse_ranks("2..16384")[-1] == 16384
    assert parse_ranks("3..13") == [3, 6, 12]
    assert parse_ranks("2,3,4") == [2, 3, 4]
    for text in ("8..2", "0..4", "", "ranks=1..2", "2...4"):
        with pytest.raises(ConfigurationError, match="--ranks"):
            parse_ranks(text)
