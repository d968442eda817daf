"""Stages: recorded, repeated only where something changed, and the same on every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import BadSource, ConfigurationError, NoSuchObject, NotAVault
from sealring.vault import Dataset, Stage, Stream, keys
from sealring.vault.datasets.building import Built, arranged, lineage, run_stages, stages_of
from sealring.vault.datasets.shards import KIND, Index, Input
from sealring.vault.datasets.work import InProcesses, Run, in_this_process
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.crashes import killed_at
from tests.vault.datasets.made import json_lines, sealed
from tests.vault.test_commands import Shell

PIPELINE = """
from sealring.vault import Stage

def clean(sample, *, shortest):
    if len(sample["text"]) >= shortest:
        return {"text": sample["text"].upper()}

def tokenise(sample, *, times):
    for _ in range(times):
        yield {"tokens": list(sample["text"].encode())}

STAGES = [
    Stage("tokenised", of="cleaned", function=tokenise, fields={"tokens": "array:uint16"},
          parameters={"times": 1}),
    Stage("cleaned", of="raw", function=clean, fields={"text": "text"},
          parameters={"shortest": 7}),
]
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.py"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def raw(vault: Vault, tmp_path: Path) -> Built:
    return sealed(vault, json_lines(tmp_path / "source"), "raw")


def run(vault: Vault, pipeline: Path, how: Run = in_this_process) -> dict[str, Built]:
    return {one.name: one for one in run_stages(vault, stages_of(pipeline), how)}


def texts(vault: Vault) -> list[str]:
    dataset = Dataset(vault, "tokenised")
    found = [dataset[number]["tokens"].tobytes().decode("utf-16-le") for number in
             range(len(dataset))]  # fmt: skip
    dataset.close()
    return found


def test_stages_are_made_in_the_order_of_their_inputs(
    vault: Vault, raw: Built, pipeline: Path
) -> None:
    made = run(vault, pipeline)
    assert list(made) == ["cleaned", "tokenised"]
    rows = [f"row {row} " + "x" * (row % 7) for row in range(100)]
    wanted = [row.upper() for row in rows if len(row) >= 7]
    assert 0 < len(wanted) < 100
    assert made["cleaned"].samples == len(wanted)
    assert texts(vault) == wanted


def test_a_second_run_changes_nothing(vault: Vault, raw: Built, pipeline: Path) -> None:
    first = run(vault, pipeline)
    again = run(vault, pipeline)
    assert all(not one.changed and one.made == 0 for one in again.values())
    assert [one.digest for one in again.values()] == [one.digest for one in first.values()]


def test_a_changed_input_makes_only_what_depends_on_it(
    vault: Vault, raw: Built, pipeline: Path, tmp_path: Path
) -> None:
    run(vault, pipeline)
    with open(tmp_path / "source" / "1.jsonl", "a") as file:
        file.write('{"n": 100, "text": "one more row"}\n')
    assert sealed(vault, tmp_path / "source", "raw").made == 1
    made = run(vault, pipeline)
    assert [(one.made, one.changed) for one in made.values()] == [(1, True), (1, True)]
    assert texts(vault)[-1] == "ONE MORE ROW"


def test_a_change_that_the_next_stage_does_not_see_ends_there(
    vault: Vault, raw: Built, pipeline: Path, tmp_path: Path
) -> None:
    before = run(vault, pipeline)
    with open(tmp_path / "source" / "1.jsonl", "a") as file:
        file.write('{"n": 100, "text": "short"}\n')
    assert sealed(vault, tmp_path / "source", "raw").changed
    made = run(vault, pipeline)
    assert (made["cleaned"].made, made["cleaned"].digest) == (1, before["cleaned"].digest)
    assert not made["tokenised"].changed


@pytest.mark.parametrize(
    ("old", "new", "remade"),
    [
        ('"times": 1', '"times": 2', {"tokenised"}),
        ('"shortest": 7', '"shortest": 8', {"cleaned", "tokenised"}),
        ("upper()", "lower()", {"cleaned", "tokenised"}),
    ],
)
def test_other_code_or_parameters(
    vault: Vault, raw: Built, pipeline: Path, old: str, new: str, remade: set[str]
) -> None:
    first = run(vault, pipeline)
    pipeline.write_text(PIPELINE.replace(old, new))
    made = run(vault, pipeline)
    changed = {name for name, one in made.items() if one.digest != first[name].digest}
    assert changed == remade


def test_lineage_leads_back_to_what_was_ingested(vault: Vault, raw: Built, pipeline: Path) -> None:
    made = run(vault, pipeline)
    found = list(lineage(vault, "tokenised"))
    assert [one.name for one in found] == ["tokenised", "cleaned", "raw"]
    assert found[0].inputs[0].digest == made["cleaned"].digest
    assert found[1].inputs[0].digest == raw.digest
    assert found[0].recipe["code"]["text"] == PIPELINE
    assert found[1].recipe["parameters"] == {"shortest": 7}
    assert found[2].recipe["ingest"] == "jsonl"


def test_processes_make_the_same(vault: Vault, raw: Built, pipeline: Path, tmp_path: Path) -> None:
    first = run(vault, pipeline)
    keys.make_key_file(tmp_path / "other.key")
    other = Vault.create(tmp_path / "other", keys.key_file(tmp_path / "other.key"), "owner")
    sealed(other, tmp_path / "source", "raw")
    with InProcesses(2) as processes:
        made = run(other, pipeline, processes)
    assert [one.digest for one in made.values()] == [one.digest for one in first.values()]


def test_killed_while_a_stage_runs_it_goes_on(
    vault: Vault, key: Path, raw: Built, pipeline: Path
) -> None:
    shards = raw.shards
    for step in (30, 45, 60):
        assert killed_at(step, lambda: run(Vault.open(vault.path, keys.key_file(key)), pipeline))
    assert run(vault, pipeline)["cleaned"].made < shards
    assert len(texts(vault)) > 0


def test_what_a_function_does_wrong_is_named(
    vault: Vault, raw: Built, pipeline: Path, tmp_path: Path
) -> None:
    cases = {
        'sample["text"].upper()': ('sample["nothing"]', r"clean: sample 1 of shard-.*KeyError"),
        '{"text": sample["text"].upper()}': ("7", "clean: sample 1 of shard.*int"),
        'sample["text"].upper()}': ('b"bytes"}', "the value of 'text' does not fit"),
    }
    for old, (new, about) in cases.items():
        pipeline.write_text(PIPELINE.replace(old, new))
        with pytest.raises(BadSource, match=about, check=coded("vault.stage_failed")):
            run(vault, pipeline)
    pipeline.write_text("1 / 0")
    with pytest.raises(
        BadSource,
        match=r"pipeline\.py does not run: ZeroDivisionError",
        check=coded("vault.stage_failed"),
    ):
        stages_of(pipeline)
    for text in ("", "STAGES = 3", "STAGES = [1]"):
        pipeline.write_text(text)
        with pytest.raises(ConfigurationError, match="no list STAGES"):
            stages_of(pipeline)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        stages_of(tmp_path / "nothing.py")


def nothing(sample: Any) -> None:
    """A stage that leaves all samples out."""


def test_stages_that_make_no_pipeline(vault: Vault, raw: Built) -> None:
    fields = {"text": "text"}
    one, two = Stage("a", "b", nothing, fields), Stage("b", "a", nothing, fields)
    with pytest.raises(ConfigurationError, match="in a circle"):
        arranged([one, two])
    with pytest.raises(ConfigurationError, match="two stages have one name"):
        arranged([one, one])
    with pytest.raises(ConfigurationError, match="made of itself"):
        Stage("a", "a", nothing, fields)
    with pytest.raises(ConfigurationError, match="are not JSON"):
        Stage("a", "b", nothing, fields, {"x": object()})
    with pytest.raises(ConfigurationError, match="the kind 'pickle'"):
        Stage("a", "b", nothing, {"text": "pickle"})
    with pytest.raises(ConfigurationError, match="stand by itself in a file"):
        list(run_stages(vault, [Stage("a", "raw", lambda sample: sample, fields)], in_this_process))
    with pytest.raises(NoSuchObject, match="the stage 'a' is made of 'b'"):
        list(run_stages(vault, [one], in_this_process))
    (built,) = run_stages(vault, [Stage("none", "raw", nothing, fields)], in_this_process)
    assert built.samples == 0
    with pytest.raises(ConfigurationError, match="has no samples"):
        Stream(Dataset(vault, "none"))


def test_build_and_what_a_dataset_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sh = Shell(tmp_path, key="k")
    sh("init", "v")
    json_lines(tmp_path / "raw")
    sh("ingest", "v", "raw")
    said = sh("build", "v", "pipeline.py")
    assert "cleaned is sealed as version 1" in said
    assert "tokenised is sealed as version 1" in said
    found = json.loads(sh("build", "v", "pipeline.py", "--json"))["stages"]
    assert [one["changed"] for one in found] == [False, False]
    shown = json.loads(sh("ls", "v", "tokenised", "--json"))["lineage"]
    assert [one["name"] for one in shown] == ["tokenised", "cleaned", "raw"]
    table = sh("ls", "v", "tokenised")
    assert "cleaned 1" in table
    assert shown[0]["digest"][:12] in table
    with pytest.raises(ConfigurationError, match="it is local or ray"):
        sh("build", "v", "pipeline.py", "--engine", "dask")


def recipe_of(stage: Any, code: Any = "00" * 32) -> str:
    return json.dumps({"stage": stage, "code": {"sha256": code}, "parameters": {}})


def forge(vault: Vault, name: str, inputs: list[Input], recipe: str) -> None:
    """As a holder of the vault's key can, or who makes a vault for a person's public key."""
    copy = vault.new_version(name)
    vault.commit(copy, KIND, name, [], Index(1, [], recipe, inputs, []).text())


@pytest.mark.threat("V38")
def test_lineage_of_datasets_that_name_each_other(vault: Vault) -> None:
    """It did not end: the number of ways back doubled with each dataset."""
    for number in range(40):
        before = [Input(f"data{number - 1}", 1, "00")] * 2 if number else []
        itself = [Input(f"data{number}", 1, "00")]
        forge(vault, f"data{number}", before + itself, recipe_of("stage"))
    found = [one.name for one in lineage(vault, "data39")]
    assert found == [f"data{number}" for number in reversed(range(40))]


@pytest.mark.parametrize(
    "recipe",
    [
        "{",
        "[" * 100_000,
        '"ingest"',
        "[]",
        "{}",
        json.dumps({"ingest": 1}),
        json.dumps({"ingest": "\x1b[2J"}),
        recipe_of("\x1b]0;title"),
        recipe_of("stage", None),
    ],
)
@pytest.mark.threat("V38")
def test_a_recipe_that_is_none(recipe: str, vault: Vault) -> None:
    """It ended with an error of Python's, or was printed with what steers a terminal."""
    forge(vault, "data", [], recipe)
    with pytest.raises(NotAVault, match="'data' version 1 does not say how it was made"):
        list(lineage(vault, "data"))


def test_an_input_with_a_name_that_is_none(vault: Vault) -> None:
    forge(vault, "data", [Input("\x1b[2J", 1, "00")], recipe_of("stage"))
    with pytest.raises(NotAVault, match="'data' version 1 does not say how it was made"):
        list(lineage(vault, "data"))
