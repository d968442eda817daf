"""Each condition that stops `make release`, one at a time."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import pytest
from tools.release import NotReady, Release

from sealring.cli import openssl


def git(tree: Path, *arguments: str) -> None:
    name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *name, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "openssl.pin").write_text("version=3.5.9\nsha256=00\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - 2026-11-16\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "a release")
    return tmp_path


def release(tree: Path, version: str = "0.2.0", *, dry: bool = False) -> Release:
    return Release(version, dry, root=tree)


def test_a_clean_tree_on_its_tag_is_ready(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssl, "NEWEST_FIX", {(3, 5): 9})
    git(tree, "tag", "--message", "0.2.0", "v0.2.0")
    made = release(tree)
    made.check_tree()
    made.check_tag()
    made.check_changelog()
    made.check_openssl()
    assert made.postponed == []


def test_a_changed_file_stops_it(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("changed")
    with pytest.raises(NotReady, match=r"the tree is not clean: M CHANGELOG\.md"):
        release(tree, dry=True).check_tree()


def test_a_file_that_is_not_committed_stops_it(tree: Path) -> None:
    (tree / "new.py").write_text("")
    with pytest.raises(NotReady, match=r"the tree is not clean: \?\? new\.py"):
        release(tree).check_tree()


@pytest.mark.parametrize("version", ["v0.2.0", "0.2", "0.2.0.dev1", "../0.2.0", "0.2.0+local"])
def test_what_is_no_version_stops_it(version: str, tree: Path) -> None:
    with pytest.raises(NotReady, match="is not a version"):
        release(tree, version, dry=True).check_tree()


def test_a_missing_tag_stops_it(tree: Path) -> None:
    with pytest.raises(NotReady, match=r"HEAD has no tag v0\.2\.0"):
        release(tree).check_tag()
    dry = release(tree, dry=True)
    dry.check_tag()
    assert dry.postponed == ["HEAD has no tag v0.2.0: git tag --sign v0.2.0"]


def test_a_tag_on_another_commit_stops_it(tree: Path) -> None:
    git(tree, "tag", "--message", "0.2.0", "v0.2.0")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "later")
    with pytest.raises(NotReady, match=r"HEAD has no tag v0\.2\.0"):
        release(tree).check_tag()


def test_a_tag_that_carries_no_signature_stops_it(tree: Path) -> None:
    git(tree, "tag", "v0.2.0")
    with pytest.raises(NotReady, match=r"v0\.2\.0 is a lightweight tag"):
        release(tree).check_tag()


def test_a_missing_heading_stops_it(tree: Path) -> None:
    with pytest.raises(NotReady, match=r"no heading '## \[0\.3\.0\] - DATE'"):
        release(tree, "0.3.0", dry=True).check_changelog()


def test_a_heading_without_a_date_stops_a_release_and_is_named_by_a_dry_run(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("## [0.2.0] - unreleased\n")
    with pytest.raises(NotReady, match=r"the date of 0\.2\.0 is 'unreleased'"):
        release(tree).check_changelog()
    dry = release(tree, dry=True)
    dry.check_changelog()
    assert dry.postponed == ["CHANGELOG.md: the date of 0.2.0 is 'unreleased'"]


def test_an_openssl_with_a_known_hole_stops_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssl, "NEWEST_FIX", {(3, 5): 10})
    monkeypatch.setattr(openssl, "AS_OF", date(2026, 11, 1))
    reason = r"native/openssl\.pin is 3\.5\.9: 3\.5\.10 fixes vulnerabilities \(as of 2026-11-01\)"
    with pytest.raises(NotReady, match=reason):
        release(tree).check_openssl()


def test_files_of_another_version_stop_it(tree: Path) -> None:
    (tree / "dist").mkdir()
    (tree / "dist" / "sealring-0.2.0-cp311-cp311-manylinux_2_34_aarch64.whl").touch()
    (tree / "dist" / "sealring-0.2.0.tar.gz").touch()
    release(tree).check_version()
    (tree / "dist" / "sealring-0.1.9.dev3-cp312-abi3-manylinux_2_34_aarch64.whl").touch()
    with pytest.raises(NotReady, match=r"the files are of \['0\.1\.9\.dev3', '0\.2\.0'\]"):
        release(tree).check_version()
