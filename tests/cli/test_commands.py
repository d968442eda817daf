"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring import __version__, _native
from sealring.cli import app
from sealring.cli.bench import parse_size, parse_world_sizes
from sealring.cli.doctor import openssl_speed, slower_without
from sealring.cli.options import parse_bytes
from sealring.errors import ConfigurationError, named
from sealring.lab.results import this_machine

SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("sealring")
tensor = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", tensor[0].item(), sys.argv[1:], os.environ["SEALRING_JOB"])
dist.destroy_process_group()
"""


def sealring(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    return subprocess.run(
        [Path(sys.executable).parent / "sealring", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,  # the test's own limit comes first
    )


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == __version__


def test_run_gives_every_worker_an_identity_and_the_script_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = sealring("run", "-n", "2", "--job", "hello", str(script), "--rate", "0.1", "-n", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sum 3.0 ['--rate', '0.1', '-n', '7'] hello"


def test_run_on_two_nodes_of_one_machine_with_a_secret_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    secret = tmp_path / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex())
    from concurrent.futures import ThreadPoolExecutor

    from tests.ports import free_port

    endpoint = f"127.0.0.1:{free_port()}"

    spelling = ("--node-rank", "--node_rank")  # torchrun accepts both

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        return sealring(
            "run", "-n", "1", "--nnodes", "2", spelling[rank], str(rank), "--rdzv-endpoint",
            endpoint, "--secret-file", str(secret), "--job", "pair", str(script),
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(node, range(2)))
    assert [done.returncode for done in nodes] == [0, 0], [done.stderr for done in nodes]
    assert "sum 3.0 [] pair" in "".join(done.stdout for done in nodes)


def test_run_on_several_machines_without_a_secret_is_refused() -> None:
    done = CliRunner().invoke(
        app, ["run", "--nnodes", "2", "--rdzv-endpoint", "h:1", "x.py"], env=_without_identity()
    )
    assert isinstance(done.exception, ConfigurationError)
    assert done.exception.code == "configuration.no_identity"
    assert "--secret-file" in str(done.exception)


def test_run_with_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "job.secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o644)
    done = CliRunner().invoke(
        app, ["run", "--secret-file", str(secret), "x.py"], env=_without_identity()
    )
    assert named(done.exception) == "configuration.bad_secret"
    assert "chmod" in str(done.exception)


def test_an_error_of_ours_is_a_sentence_and_exit_status_2() -> None:
    done = sealring("bench", "allreduce", "--size", "many")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "configuration: 'many' is not a size; write bytes, or 4KiB, 25MiB, 1GiB"
    )


WIDE = {"aes", "vaes", "vpclmulqdq", "avx512f", "avx512dq", "avx512bw", "avx512vl"}


def test_doctor_says_what_digests_cost_on_this_cpu() -> None:
    done = sealring("doctor", "--json")
    (check,) = [
        one for one in json.loads(done.stdout)["checks"] if one["check"] == "digests of a vault"
    ]
    assert re.search(r"sha256 \d+ ms and blake3 \d+ ms", check["found"])
    has = {"sha_ni", "sha2"} & set(Path("/proc/cpuinfo").read_text().split())
    assert (check["verdict"] == "ok") is bool(has)
    assert ("no SHA instructions" in check["found"]) is not bool(has)


@pytest.mark.parametrize(
    ("cpu", "architecture", "told"),
    [
        (WIDE, "x86_64", ""),
        (WIDE - {"vaes"}, "x86_64", "; this CPU has no VAES"),
        ({"aes", "pmull"}, "aarch64", ""),
    ],
)
def test_doctor_says_that_a_cpu_has_no_vaes(cpu: set[str], architecture: str, told: str) -> None:
    assert slower_without(cpu, architecture) == told


def test_doctor_reports_each_check_and_its_verdict() -> None:
    done = sealring("doctor", "--json", SEALRING_SECRET=os.urandom(32).hex())
    report = json.loads(done.stdout)
    checks = {check["check"]: check["verdict"] for check in report["checks"]}
    assert report["healthy"] is (done.returncode == 0)
    for name in ("torch", "backend", "identity", "OpenSSL, handshake", "shared memory"):
        assert checks[name] == "ok", report
    assert {"AES instructions", "ports, IPv4", "interface", "clock"} <= set(checks)
    assert any(name.startswith("GPU") for name in checks)


@pytest.mark.parametrize(
    ("number", "cpu", "verdict"),
    [
        (0x30000130, WIDE, "warning"),
        (0x30100000, WIDE, "ok"),
        (0x30500070, WIDE, "ok"),
        (0x30000130, WIDE - {"avx512vl"}, "ok"),
        (0x30000130, {"aes", "pmull"}, "ok"),
    ],
)
def test_doctor_warns_of_an_openssl_that_is_slower_than_the_cpu(
    number: int, cpu: set[str], verdict: str
) -> None:
    finding = openssl_speed(number, cpu)
    assert ("ok" if finding is None else finding.verdict) == verdict
    assert finding is None or "SEALRING_STATIC_OPENSSL" in finding.fix


def test_doctor_and_results_name_the_openssl_that_seals() -> None:
    version = _native.openssl_version()
    number = _native.openssl_version_number()
    major, minor, patch = number >> 28, number >> 20 & 0xFF, number >> 4 & 0xFF
    assert version.startswith(f"OpenSSL {major}.{minor}.{patch}")
    assert this_machine().openssl == version
    report = json.loads(sealring("doctor", "--json").stdout)
    (found,) = [each["found"] for each in report["checks"] if each["check"] == "OpenSSL, records"]
    assert found.startswith(version)
    assert ("built into sealring" in found) is _native.OPENSSL_BUILT_IN


def test_doctor_says_that_torch_is_not_installed() -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "sys.argv = ['sealring', 'doctor', '--json']; "
        "runpy.run_module('sealring.cli', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    verdicts = {one["check"]: one["verdict"] for one in json.loads(done.stdout)["checks"]}
    assert (done.returncode, verdicts["torch"], "GPU" in verdicts) == (1, "problem", False)


def test_doctor_names_a_bad_identity_as_a_problem() -> None:
    done = sealring("doctor", "--json", SEALRING_SECRET="short")
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["identity"]["verdict"] == "problem"
    assert checks["identity"]["found"] == "configuration.bad_secret"


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_doctor_names_a_variable_that_is_no_number(variable: str) -> None:
    done = sealring("doctor", "--json", SEALRING_SECRET=os.urandom(32).hex(), **{variable: "one"})
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["identity"]["found"] == "configuration"
    assert checks["identity"]["fix"] == f"{variable} is 'one', which is not a number: unset it"


def test_bench_allreduce_prints_what_programs_read() -> None:
    done = sealring(
        "bench", "allreduce", "--ranks", "2", "--size", "4096", "--blocks", "3", "--json"
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["cases"]
    assert result["ranks"] == 2
    assert result["bytes"] == 4096
    assert result["suite"] == "AES-256-GCM"
    assert result["sealed_bytes"] == 4096  # a small tensor is published once, for all ranks
    if result["ratio"] is None:
        assert result["noise"] > 0.05
    else:
        assert result["ratio"] == pytest.approx(result["sealed_us"] / result["gloo_us"], abs=2e-4)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4KiB", 4096), ("25MiB", 25 << 20), ("1 gib", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_only_benchmarks_need_a_multiple_of_four_bytes() -> None:
    assert parse_bytes("3") == 3
    with pytest.raises(ConfigurationError, match="not a whole number of float32 values"):
        parse_size("3")


@pytest.mark.parametrize("text", ["", "4KB", "-4", "3", "0", "1e6"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_size(text)


def test_world_sizes() -> None:
    assert parse_world_sizes("2,3,4,8") == [2, 3, 4, 8]
    for text in ("2;3", "1", "2,,3", "500"):
        with pytest.raises(ConfigurationError):
            parse_world_sizes(text)


def _without_identity() -> dict[str, str | None]:
    return {name: None for name in os.environ if name.startswith("SEALRING_")}
