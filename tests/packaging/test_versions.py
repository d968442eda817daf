"""The version comes from git's tags; without tags there is a sensible one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import sealring

ROOT = Path(__file__).parents[2]
CODE = (
    "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as p; "
    "print(p(sys.argv[1]))"
)


def git(tree: Path, *arguments: str) -> None:
    name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *name, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Makes a repository with all that the version depends on, but without a tag."""
    folder = tmp_path / "tree"
    (folder / "src" / "sealring").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt", ".git_archival.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / ".gitattributes").write_bytes((ROOT / ".gitattributes").read_bytes())
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "a change")


def version_of(tree: Path, out: Path) -> str:
    """Returns the version from the build's own hook, which compiles nothing."""
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", CODE, out], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1].removeprefix("sealring-").removesuffix(".dist-info")


def test_what_is_installed_says_its_own_version() -> None:
    assert version("sealring") == sealring.__version__
    assert Version(sealring.__version__) >= Version("0.1.0.dev0")


def test_a_tagged_commit_has_the_version_of_its_tag(tree: Path, tmp_path: Path) -> None:
    git(tree, "tag", "--message", "a release", "v0.3.0rc1")
    assert version_of(tree, tmp_path / "out") == "0.3.0rc1"


def test_a_later_commit_sorts_after_the_tag_and_names_itself(tree: Path, tmp_path: Path) -> None:
    git(tree, "tag", "--message", "a release", "v0.3.0")
    commit(tree)
    found = Version(version_of(tree, tmp_path / "out"))
    assert Version("0.3.0") < found < Version("0.3.1")
    assert found.is_devrelease
    assert found.local is not None
    assert found.local.startswith("g")


def test_without_a_tag_it_sorts_before_the_first_release(tree: Path, tmp_path: Path) -> None:
    found = Version(version_of(tree, tmp_path / "out"))
    assert Version("0.1.0.dev0") <= found < Version("0.1.0a0")


def test_files_without_history_have_a_version_too(tree: Path, tmp_path: Path) -> None:
    (tree / ".git").rename(tmp_path / "elsewhere")
    assert version_of(tree, tmp_path / "out") == "0.1.0.dev0"


def test_an_archive_of_a_tag_has_its_version(tree: Path, tmp_path: Path) -> None:
    git(tree, "tag", "--message", "a release", "v0.3.0")
    git(tree, "archive", "--output", str(tmp_path / "tree.tar"), "HEAD")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "tree.tar", "-C", unpacked], check=True)
    assert version_of(unpacked, tmp_path / "out") == "0.3.0"


def test_all_takes_every_other_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("sealring[").removesuffix("]").split(",")
    # Ray is a cluster system and larger than all other extras, so users ask for it by name.
    assert set(named) == set(extras) - {"all", "ray"}
