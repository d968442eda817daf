"""`sealring doctor` names an OpenSSL that is known to lack security fixes."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from sealring.cli import openssl
from sealring.cli.openssl import AS_OF, ENDED, NEWEST_FIX, Library, age_of_list, what_is_wrong


def library(major: int, minor: int, patch: int, maintained_by: str = "") -> Library:
    number = major << 28 | minor << 20 | patch << 4
    return Library("records", f"OpenSSL {major}.{minor}.{patch}", number, maintained_by)


@pytest.mark.parametrize("branch", NEWEST_FIX)
def test_a_patch_release_that_lacks_a_fix(branch: tuple[int, int]) -> None:
    newest, before_any_end = NEWEST_FIX[branch], date(2026, 9, 1)
    for maintained_by in ("", "a distribution"):
        outdated = library(*branch, newest - 1, maintained_by)
        said = what_is_wrong(outdated, before_any_end)
        assert said == f"{branch[0]}.{branch[1]}.{newest} fixes vulnerabilities (as of {AS_OF})"
        assert what_is_wrong(library(*branch, newest, maintained_by), before_any_end) is None
        assert what_is_wrong(library(*branch, newest + 1, maintained_by), before_any_end) is None


def test_a_branch_that_has_ended() -> None:
    end = ENDED[3, 0]
    newest = NEWEST_FIX[3, 0]
    assert what_is_wrong(library(3, 0, newest), end - timedelta(days=1)) is None
    assert "gets no fixes since 2026-09-07" in str(what_is_wrong(library(3, 0, newest), end))
    # The distribution maintains 3.0, and no other ended branch that is known.
    assert what_is_wrong(library(3, 0, newest, "a distribution"), end) is None
    assert "gets no fixes since" in str(what_is_wrong(library(3, 2, 99, "a distribution"), end))
    assert "gets no fixes any more" in str(what_is_wrong(library(1, 1, 1, "a distribution"), end))


def test_a_branch_that_is_newer_than_the_list_is_not_judged() -> None:
    assert what_is_wrong(library(4, 1, 0), AS_OF) is None


def test_an_old_list_says_that_it_is_old() -> None:
    assert age_of_list(AS_OF + timedelta(days=180)) is None
    assert "181 days old" in str(age_of_list(AS_OF + timedelta(days=181)))


def test_all_libraries_of_this_process_are_listed() -> None:
    found = {one.use: one for one in openssl.libraries()}
    assert set(found) == {"records", "handshake", "Python"}
    for one in found.values():
        assert one.text.startswith(f"OpenSSL {one.branch[0]}.{one.branch[1]}.{one.patch}")
