"""Every way in which torch or a framework asks for a plaintext group, under `sealring run`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.sealed_only import refused, served

OURS = "SealedProcessGroup sealring"


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "SEALRING_SECRET": secrets.token_hex(32), **changed}


def got(output: str) -> Any:
    (line,) = (each for each in output.splitlines() if each.startswith("GOT "))
    return json.loads(line.removeprefix("GOT "))


def run(*arguments: object, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sealring.cli", "run", *map(str, arguments)],
        env=environment(PYTHONPATH=".", **changed),
        capture_output=True,
        text=True,
    )


@pytest.mark.threat("G1")
def test_doors_that_are_served(tmp_path: Path) -> None:
    result = run("-n", 2, served.__file__, tmp_path / "checkpoint")
    assert result.returncode == 0, result.stderr
    assert got(result.stdout) == {
        "no name": OURS,
        "gloo": OURS,
        "nccl": OURS,
        "cpu:gloo": OURS,
        "cpu:gloo,cuda:nccl": OURS,
        "cpu:sealring,cuda:nccl": OURS,
        "saved by a process": "[7.0, 7.0, 7.0, 7.0]",
        "a child": OURS,
        "a second default group": OURS,
    }


@pytest.mark.threat("G2", "G7")
def test_doors_that_are_refused() -> None:
    result = run(refused.__file__)
    assert result.returncode == 0, result.stderr
    answer = got(result.stdout)
    errors, lines = answer["errors"], answer["lines"]
    assert errors.pop("git without the setting") == "no error"
    assert errors.pop("a fake group") == "no error"
    for name, error in errors.items():
        assert error.startswith("PlaintextGroup: "), name
        assert f"{refused.__file__}:" in error, error
        # There, the reported line is deeper in the code.
        if "taken out" not in name and "operator" not in name:
            assert f"{refused.__file__}:{lines[name]}" in error, error
    assert "sealring cannot do what 'xccl' does" in errors["xccl"]
    assert "sealring has no tensors on xpu" in errors["another device"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in errors["a child without the guard"]
    assert "sets SEALRING_ONLY=0 in the environment" in errors["a child that is told 0"]
    for name in ("symmetric memory's operator", "symmetric memory's operator without gradients"):
        assert "uses torch.ops.symm_mem.one_shot_all_reduce, which is not sealed" in errors[name]


def refusal(code: str, **changed: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(**changed), capture_output=True, text=True
    )
    assert result.returncode != 0, result.stdout
    return result.stderr.splitlines()[-1]


GROUP = "PlaintextGroup: a process group of backend gloo"
THREAD = f"{GROUP}, whose thread pt_gloo_runloop runs, exists already"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            'dist.init_process_group("gloo", store=store, rank=0, world_size=1)',
            f"{GROUP} exists already",
        ),
        ("group = dist.ProcessGroupGloo(store, 0, 1)", THREAD),
        (
            # Now Python has no reference to Gloo's object.
            "group = dist.ProcessGroup(store, 0, 1); group._register_backend(torch.device('cpu'), "
            "dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1))",
            THREAD,
        ),
        (
            "rpc.init_rpc('worker', rank=0, world_size=1, rpc_backend_options="
            "rpc.TensorPipeRpcBackendOptions(init_method='tcp://127.0.0.1:0'))",
            "PlaintextGroup: an agent of torch.distributed.rpc, whose thread TP_",
        ),
    ],
    ids=["torch's", "a class", "a class that C++ holds", "rpc"],
)
@pytest.mark.threat("G5")
def test_what_is_in_plaintext_and_exists_already(make: str, told: str) -> None:
    code = f"""
import sealring, torch, torch.distributed as dist
from torch.distributed import rpc
store = dist.HashStore()
{make}
try:
    sealring.require_sealed()
except sealring.errors.PlaintextGroup as error:
    import os
    print("PlaintextGroup:", error, flush=True)
    os._exit(0)  # an RPC agent that is left at the end waits
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert told in done.stdout, done.stderr


def test_a_plaintext_group_that_is_gone() -> None:
    code = """
import sealring, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
sealring.require_sealed()
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


# Linux keeps 15 bytes of the second name, which end in the middle of its last letter.
@pytest.mark.parametrize("name", ["TP_train.py", "14_ascii_bytes\u00fc.py"])
def test_a_script_whose_name_its_threads_have_too(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.write_text(f"#!{sys.executable}\nimport sealring, torch; sealring.require_sealed()\n")
    script.chmod(0o700)
    subprocess.run([script], env=environment(SEALRING_ONLY="1"), check=True)


def test_a_script_that_handles_a_signal_of_the_mark_still_gets_it() -> None:
    code = """
import os, sealring, signal
got = []
signal.signal(44, lambda number, _: got.append(number))
sealring.require_sealed()
os.kill(os.getpid(), 44)
assert got == [44]
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"SEALRING_ONLY": "yes"}, "ConfigurationError: SEALRING_ONLY is 'yes'"),
        (
            {"SEALRING_ONLY": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "PlaintextGroup: this process's environment has TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ),
    ],
)
def test_a_setting_that_is_wrong(changed: dict[str, str], told: str) -> None:
    code = """
import torch.distributed as dist, sealring.core.registration
sealring.core.registration.register()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    assert told in refusal(code, **changed)


@pytest.mark.threat("G7")
def test_the_launcher_refuses_workers_without_the_guard() -> None:
    result = run(served.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 2
    assert "this process's environment has TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stderr


@pytest.mark.parametrize("command", [["demo"], ["bench", "allreduce"]])
def test_commands_that_measure_plaintext_are_refused(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sealring.cli", *command],
        env=environment(SEALRING_ONLY="1"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "configuration: this command measures plaintext" in result.stderr


def test_a_setting_that_is_taken_out_before_torch_is_loaded() -> None:
    code = """
import os, sealring; sealring.require_sealed()
del os.environ["SEALRING_ONLY"]
import torch.distributed as dist
dist.init_process_group("xccl", store=dist.HashStore(), rank=0, world_size=1)
"""
    assert "PlaintextGroup: <string>:5 asks for a process group" in refusal(code)


def test_it_can_be_required_before_torch_is_loaded() -> None:
    code = """
import sealring; sealring.require_sealed()
import sys; assert "torch" not in sys.modules
import torch.distributed as dist
dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
"""
    assert "PlaintextGroup: <string>:5 uses ProcessGroupGloo" in refusal(code)
