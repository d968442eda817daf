from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.identity import WorkerName
from sealring.errors import ConfigurationError
from sealring.limits import MAX_WORLD

JOBS = st.from_regex(r"[A-Za-z0-9._-]{1,63}", fullmatch=True).filter(
    lambda job: job not in {".", ".."}
)


@given(JOBS, st.integers(0, MAX_WORLD - 1))
def test_a_name_survives_its_uri(job: str, rank: int) -> None:
    name = WorkerName(job, rank)
    assert WorkerName.parse(name.uri) == name


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    name = WorkerName.parse(text)
    assert name is None or name.uri == text


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://sealring/job/rank/01",
        "spiffe://sealring/job/rank/-1",
        "spiffe://sealring/job/rank/65536",
        "spiffe://sealring/job/rank/1\n",
        "spiffe://sealring/job/rank/\u0661",
        "spiffe://sealring/../rank/1",
        "spiffe://sealring/a/b/rank/1",
        "spiffe://sealring/job%41/rank/1",
        "spiffe://other/job/rank/1",
        "SPIFFE://sealring/job/rank/1",
        "spiffe://sealring//rank/1",
        "",
    ],
)
@pytest.mark.threat("J3")
def test_other_spellings_are_no_names(uri: str) -> None:
    assert WorkerName.parse(uri) is None


@pytest.mark.parametrize(
    ("job", "rank"),
    [("", 0), ("a b", 0), ("j" * 64, 0), ("..", 0), ("job", -1), ("job", MAX_WORLD)],
)
def test_a_name_that_cannot_be_is_not_made(job: str, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        WorkerName(job, rank)
