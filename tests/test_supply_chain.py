"""What sealring is built from is locked by hash, listed and checked."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools import wheels

from sealring import _native

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
ENTRY = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_pinned_package_is_locked_by_hash_and_nothing_else_is() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    locked = {name: version for name, version, _ in ENTRY.findall(LOCK)}
    assert locked == {plain(name): version for name, version in pinned}
    left = ENTRY.sub("", LOCK).split("\n")
    assert all(not line or line.startswith("#") for line in left), "an entry without a hash"


def locked_here(**settings: str) -> dict[str, str]:
    """Returns what the lock's tool would install with only these settings of pip."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "lock.py", "here"],
        capture_output=True, text=True, env={**environ, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: version for name, version, _ in ENTRY.findall(done.stdout)}


def test_the_index_s_torch_comes_with_the_libraries_of_cuda() -> None:
    """Without these libraries `import torch` fails; `make demo` once failed without a CPU build."""
    found = locked_here(PIP_CONFIG_FILE=os.devnull)
    assert found == {name: version for name, version, _ in ENTRY.findall(LOCK)}
    assert {"torch", "nvidia-cudnn-cu13", "cuda-bindings", "triton"} <= found.keys()


def test_a_local_cpu_build_of_torch_leaves_them_out(tmp_path: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"torch-2.13.0+cpu-{python}-{python}-linux_{platform.machine()}.whl").touch()
    found = locked_here(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS=tmp_path.as_uri(), PIP_QUIET="1")
    assert found["torch"] == "2.13.0+cpu"
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert {"numpy", "torchdata"} <= found.keys()


@pytest.mark.parametrize(
    ("machine", "digest"),
    [
        ("aarch64", "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7"),
        ("x86_64", "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"),
    ],
)
def test_torchs_cpu_build_is_locked_for_both_architectures(machine: str, digest: str) -> None:
    """2.13.0+cpu for Python 3.11. A worker's image cannot be made there without this hash."""
    (hashes,) = [found[2] for found in ENTRY.findall(LOCK) if found[0] == "torch"]
    assert f"sha256:{digest}" in hashes, machine


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "h11-0.16.0-py3-none-any.whl"
    wheel.write_bytes(b"not the file that was locked")
    (entry,) = [found.group(0) for found in ENTRY.finditer(LOCK) if found.group(1) == "h11"]
    (tmp_path / "requirements.txt").write_text(entry)
    options = ["--no-index", "--no-deps", "--require-hashes", "--find-links", str(tmp_path)]
    files = ["--dest", str(tmp_path / "out"), "-r", str(tmp_path / "requirements.txt")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "download", *options, *files],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    tool = [sys.executable, str(ROOT / "tools" / "sbom.py")]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_the_bill_of_materials_is_cyclonedx(bill: dict[str, Any]) -> None:
    """The bill meets its schema: required fields, unique references, no dangling reference."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    uuid = r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    assert re.fullmatch(uuid, bill["serialNumber"])
    components = [bill["metadata"]["component"], *bill["components"]]
    for one in components:
        assert one["type"] == "library"
        assert all(one[field] for field in ("bom-ref", "name", "version"))
        assert re.fullmatch(r"pkg:(pypi|generic)/[a-z0-9-]+@[A-Za-z0-9.%]+", one["purl"])
    references = [one["bom-ref"] for one in components]
    assert len(set(references)) == len(references)
    assert sorted(one["ref"] for one in bill["dependencies"]) == sorted(references)
    for one in bill["dependencies"]:
        assert set(one["dependsOn"]) <= set(references)


def test_the_bill_of_materials_lists_what_is_used(bill: dict[str, Any]) -> None:
    versions = {one["name"]: one["version"] for one in bill["components"]}
    locked = {name: version for name, version, _ in ENTRY.findall(LOCK)}
    assert versions.pop("openssl") in _native.openssl_version()
    assert {"torch", "cryptography", "cffi", "h11"} <= versions.keys()
    for name, version in versions.items():
        assert version.split("+")[0] == locked[name], name
    (linkage,) = [one["properties"] for one in bill["components"] if one["name"] == "openssl"]
    value = "static" if _native.OPENSSL_BUILT_IN else "shared"
    assert linkage == [{"name": "sealring:linkage", "value": value}]


WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))


def test_workflows_name_actions_by_commit() -> None:
    """An attacker who takes over an action's repository can move a tag to other code."""
    used = [
        (path.name, one)
        for path in WORKFLOWS
        for one in re.findall(r"^[ -]*uses:(.*)$", path.read_text(), re.MULTILINE)
    ]
    assert len(used) > 10
    commit = re.compile(r" [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")
    assert [each for each in used if not commit.fullmatch(each[1])] == []


def test_workflows_name_images_by_digest() -> None:
    named = [
        (path.name, one)
        for path in WORKFLOWS
        for one in re.findall(
            r"^[ -]*(?:image|container):\s*(\S.*)$|((?:quay|docker|ghcr)\.io/\S+)",
            path.read_text(),
            re.MULTILINE,
        )
    ]
    images = [(name, whole or part) for name, (whole, part) in named]
    assert len(images) == 2
    digest = re.compile(r"[\w.-]+/[\w./-]+@sha256:[0-9a-f]{64}")
    assert [each for each in images if not digest.fullmatch(each[1])] == []


def test_what_builds_a_release_installs_locked_packages_alone() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert not re.search(r"\b(pip|pipx|uv|npm|cargo|gem)\s+install|curl|wget", text)
    for name in ("wheels.py", "manylinux.sh", "reproducible.sh", "release.py"):
        tool = (ROOT / "tools" / name).read_text()
        for call in re.findall(r"\bpip\b[^)]*?\b(?:install|wheel)\b[^)]*", tool):
            assert "--require-hashes" in call or "--no-build-isolation" in call, (name, call)


def test_the_lock_has_all_that_a_wheel_is_built_and_checked_with() -> None:
    locked = {name for name, _, _ in ENTRY.findall(LOCK)}
    assert {*wheels.BUILD_TOOLS, *wheels.CHECKING_TOOLS} <= locked
    asked = (ROOT / "pyproject.toml").read_text().partition("requires = [")[2].partition("]")[0]
    names = {plain(name) for name in re.findall(r'"([\w-]+)', asked)}
    assert names
    assert names <= set(wheels.BUILD_TOOLS)
