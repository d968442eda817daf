"""What cannot be measured is refused before the start, in one sentence that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sealring.cli import app
from sealring.cli import bench as options
from sealring.core.schedule.table import parse_table, shipped_table
from sealring.errors import ConfigurationError
from sealring.lab import __main__ as lab
from sealring.lab.bench.workers import CPU, WorkerPlace


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["step", "--model", "gpt-9"], "'gpt-9' is not a model; there is gpt-demo, gpt-small, mlp"),
        (["step", "--bucket-cap-mb", "0"], "a bucket of '0' MB holds no gradient; DDP's own def"),
        (["step", "--bucket-cap-mb", "25,many"], "a bucket of 'many' MB holds no gradient"),
        (["step", "--bucket-cap-mb", "nan"], "a bucket of 'nan' MB"),
        (["step", "--batch", "0"], "a batch of '0' samples cannot be trained; write 1 or more"),
        (["step", "--precision", "fp8"], "'fp8' is not a precision; there is fp32, bf16"),
        (
            ["step", "--variants", "null"],
            "'null' is not a variant; there is compute, plain, sealed",
        ),
        (["step", "--ranks", "1"], "1 ranks: the benchmark runs 2 to 64 of them"),
        (["step", "--ranks", "64", "--model", "gpt2-xl"], "64 ranks of gpt2-xl (1,557,611,200 par"),
        (
            ["step", "--ranks", "2,4", "--trace", "t.json"],
            "one trace shows one world: pass --ranks",
        ),
        (["step", "--results", "no/such/r.json"], "no/such/r.json cannot be written: there is no"),
        (["step", "--device", "tpu"], "--device is 'tpu'; it must be one of cpu, cuda, auto"),
        (["all", "--only", "aead,gpus"], "'gpus' is not a part; there is aead, link, allreduce"),
        (["all", "--output", "/dev/null/x"], "/dev/null/x cannot be made: Not a directory"),
    ],
)
def test_refused(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(app, ["bench", *arguments], sentence, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["link", "--sizes", "4KiB,1MiB"], "a line needs three sizes at least"),
        (["link", "--transports", "udp"], "'udp' is not a transport; there is shm, tcp"),
        (["scale", "--ranks", "2,many"], "--ranks is '2,many': write numbers from 2 on with comm"),
        (["algorithms", "--table", "no/such/t.toml"], "no/such/t.toml cannot be written: there is"),
        (["scale", "--ranks", "1"], "--ranks is '1': write numbers from 2 on"),
    ],
)
def test_the_labs_own_refuse_too(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(lab.app, arguments, sentence, tmp_path, monkeypatch)


def test_the_labs_own_are_run_as_a_module_and_are_no_commands() -> None:
    module = [sys.executable, "-m", "sealring.lab", "link", "--sizes", "4KiB"]
    done = subprocess.run(module, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("configuration: a line needs three sizes at least")
    users, own = (
        {each.name or each.callback.__name__ for each in one.registered_commands if each.callback}
        for one in (options.app, lab.app)
    )
    assert users == {"allreduce", "step", "vault", "all", "report"}
    assert own.isdisjoint(users)


def refused(
    commands: typer.Typer,
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(commands, arguments)
    assert type(done.exception) is ConfigurationError
    assert str(done.exception).startswith(sentence)
    assert "\n" not in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_way_out_of_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPlace, "free_bytes", lambda _: 1 << 30)
    settings = options.settings_of(["gpt-small"], None, ["fp32"], [25.0])
    options.check_memory(settings, 2, 2)
    with pytest.raises(ConfigurationError, match=r"need 1\.6 GiB and 1\.0 GiB are free: take"):
        options.check_memory(settings, 4, 2)


def test_ranks_on_a_gpu_must_fit_into_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPlace, "free_bytes", lambda _: 100 << 30)
    settings = options.settings_of(["gpt2-xl"], None, ["fp32"], [25.0])
    options.check_memory(settings, 4, 2, WorkerPlace("cuda", "H200", gpus=4))
    with pytest.raises(
        ConfigurationError, match=r"^2 ranks of gpt2-xl .*of one H200 and 100\.0 Gi"
    ):
        options.check_memory(settings, 4, 2, WorkerPlace("cuda", "H200", gpus=2))


def test_the_emulated_path_has_no_gpu() -> None:
    options.check_variants(("plain", "sealed"), WorkerPlace("cuda", "H200", gpus=1))
    options.check_variants(("sealed", "cc"), CPU)
    with pytest.raises(
        ConfigurationError, match=r"^cc emulates the GPU-TEE path on CPUs .* --devi"
    ):
        options.check_variants(("sealed", "cc"), WorkerPlace("cuda", "H200", gpus=1))


def test_every_combination_is_a_setting() -> None:
    settings = options.settings_of(["mlp", "gpt-demo"], [4, 8], ["fp32", "bf16"], [1.0, 25.0])
    assert len(set(settings)) == 16
    default = options.settings_of(["gpt-small"], None, ["fp32"], [25.0])
    assert [each.batch for each in default] == [2]


def test_variants_come_in_one_order_and_sealed_is_among_them() -> None:
    assert options.parse_variants("cc, plain") == ("plain", "sealed", "cc")
    assert options.parse_variants("compute") == ("compute", "sealed")


def test_this_machine_has_memory() -> None:
    assert 1 << 26 < CPU.free_bytes() < 1 << 50


def test_the_table_in_force_as_json() -> None:
    done = CliRunner().invoke(lab.app, ["algorithms", "--show", "--json"])
    assert parse_table(json.loads(done.stdout)["table"], "this") == shipped_table()
