"""The file of claims, and how each claim is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sealring.attest.evidence.policy import Policy
from sealring.errors import BadPolicy
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import RunClaims, read_claims
from sealring.record.audit.findings import Said
from sealring.record.statements.forms import LinkAccount, Privacy, Share
from tests.codes import coded
from tests.record.audit.made_runs import CLEANER, CORPUS, RAW, SCRIPT, MadeRun, checkpoint, sha

WHOLE = f"""
version = 1
trained_only_on = ["{RAW.sha256}"]
stages = [{{ name = "clean", code = "{CLEANER.sha256}" }}, {{ name = "tokenize" }}]
code = {{ "train.py" = ["{SCRIPT.sha256}"] }}
ranks = 4
aggregation = {{ kinds = ["all_reduce"], every_step = true }}
privacy = {{ epsilon = "8.0", delta = "1e-5" }}
no_gaps = true
"""


def claims_of(tmp_path: Path, text: str) -> RunClaims:
    path = tmp_path / "claims.toml"
    path.write_text(text)
    return read_claims(path)


def asked(tmp_path: Path, made: MadeRun, text: str) -> AuditResult:
    run = made.write(tmp_path / "run")
    return audit(run.path, made.trust, AuditQuestion(claims_of(tmp_path, f"version = 1\n{text}")))


def answer(tmp_path: Path, made: MadeRun, text: str) -> tuple[Said, str]:
    (found,) = asked(tmp_path, made, text).answers
    return found.said, found.text


def test_a_file_with_every_claim(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(
        'version = 1\n[simulated]\nroots = ["'
        + "ab" * 32
        + '"]\nmeasurements = ["'
        + "cd" * 32
        + '"]\n'
    )
    found = claims_of(tmp_path, WHOLE + 'machines = "policy.toml"\n')
    assert found.trained_only_on == frozenset({RAW.sha256})
    assert found.stages is not None
    assert [(one.name, one.code) for one in found.stages] == [
        ("clean", CLEANER.sha256), ("tokenize", None),
    ]  # fmt: skip
    assert isinstance(found.machines, Policy)
    assert list(found.machines.kinds) == ["simulated"]
    assert found.privacy is not None
    assert str(found.privacy.delta) == "0.00001"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "version is 1"),
        ("version = 2\nranks = 1", "version is 1"),
        ("version = true\nranks = 1", "version is 1"),
        ("version = 1", "claims nothing"),
        ("version = 1\nranks = 1\nranks = 2", "not TOML"),
        ("version = 1\nrank = 1", "rank is not known here"),
        ("version = 1\nranks = 0", "ranks is a number"),
        ('version = 1\ntrained_only_on = "x"', "list of SHA-256"),
        ("version = 1\ntrained_only_on = []", "list of SHA-256"),
        ('version = 1\ntrained_only_on = ["x"]', "no SHA-256 digest"),
        ("version = 1\nstages = [{}]", "stages[0] has a name"),
        ("version = 1\nstages = [{ name = 'a', when = 1 }]", "stages[0].when is not known"),
        ("version = 1\ncode = {}", "code is a table"),
        ("version = 1\naggregation = { kinds = [] }", "aggregation.kinds is a list"),
        ("version = 1\naggregation = { kinds = ['a'], every_step = 1 }", "every_step is true"),
        ("version = 1\nprivacy = { epsilon = 8.0, delta = '0' }", "privacy.epsilon is a number in"),
        ("version = 1\nprivacy = { epsilon = 'nan', delta = '0' }", "privacy.epsilon is a number"),
        ("version = 1\nprivacy = { epsilon = '8' }", "privacy.delta is a number"),
        ("version = 1\nno_gaps = false", "no_gaps is true"),
        ("version = 1\nmachines = 1", "machines is the name"),
        ("version = 1\nmachines = 'absent.toml'", "the policy"),
        ("version = 1\nmachines = 'claims.toml'", "cannot be used"),
    ],
)
def test_claims_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadPolicy, check=coded("configuration.bad_claims")) as problem:
        claims_of(tmp_path, text)
    assert said in str(problem.value)


def small() -> MadeRun:
    return MadeRun(world=2, count=2)


def test_without_claims_only_contradictions_count(tmp_path: Path) -> None:
    made = small()
    result = audit(made.write(tmp_path / "run").path, made.trust)
    assert (result.answers, result.findings, result.status) == ((), (), Status.SHOWN)


def without_data(made: MadeRun) -> None:
    for rank in range(made.world):
        made.each(rank, lambda one: replace(one, data=[]))


def from_outside(made: MadeRun) -> None:
    for rank in range(made.world):
        made.change(rank, 0, checkpoints_in=[replace(checkpoint(0), name="foundation@1")])


def gpu_links(made: MadeRun) -> None:
    def unkept(link: LinkAccount) -> LinkAccount:
        return replace(link, sent=None, received=None)

    for rank in range(made.world):
        made.each(rank, lambda one: replace(one, links=[unkept(each) for each in one.links]))


def unended(made: MadeRun) -> None:
    for rank in range(made.world):
        made.change(rank, made.count - 1, final=False)


def private(epsilon: str, delta: str = "1e-6") -> Callable[[MadeRun], None]:
    def change(made: MadeRun) -> None:
        for rank in range(made.world):
            made.each(
                rank, lambda one: replace(one, privacy=Privacy("dp-sgd", epsilon, delta, "{}"))
            )

    return change


def other_kind(made: MadeRun) -> None:
    for rank in range(made.world):
        made.each(
            rank,
            lambda one: replace(
                one, collectives=[*one.collectives, replace(one.collectives[0], kind="broadcast")]
            ),
        )


def few_collectives(made: MadeRun) -> None:
    for rank in range(made.world):
        made.each(
            rank, lambda one: replace(one, collectives=[replace(one.collectives[0], count=1)])
        )


def no_stages(made: MadeRun) -> None:
    made.made = made.made[2:]


DATA = f'trained_only_on = ["{RAW.sha256}"]'
FEW = 'aggregation = { kinds = ["all_reduce"], every_step = true }'
EPSILON = 'privacy = { epsilon = "8", delta = "1e-5" }'
CASES: dict[str, tuple[Callable[[MadeRun], None] | None, str, Said, str]] = {
    "the dataset itself is listed": (None, f'trained_only_on = ["{CORPUS.sha256}"]', Said.YES, ""),
    "another source": (None, f'trained_only_on = ["{sha("x")}"]', Said.NO, "raw.jsonl"),
    "no data named": (without_data, DATA, Said.NOT_SHOWN, "name no samples"),
    "starts from a strange checkpoint": (from_outside, DATA, Said.NO, "foundation@1"),
    "other stages": (None, 'stages = [{ name = "clean" }]', Said.NO, "clean -> tokenize"),
    "stages by other code": (
        None,
        f'stages = [{{ name = "clean", code = "{sha("x")}" }}, {{ name = "tokenize" }}]',
        Said.NO,
        "other code",
    ),
    "stages that no record tells": (
        no_stages, 'stages = [{ name = "clean" }]', Said.NOT_SHOWN, "no record says how",
    ),
    "other code": (None, f'code = {{ "train.py" = ["{sha("x")}"] }}', Said.NO, "not claimed"),
    "no container": (
        None,
        f'code = {{ "train.py" = ["{SCRIPT.sha256}"], container = ["{sha("image")}"] }}',
        Said.NOT_SHOWN,
        "container",
    ),
    "other packages": (
        None,
        f'code = {{ "train.py" = ["{SCRIPT.sha256}"], packages = ["{sha("x")}"] }}',
        Said.NO,
        "packages",
    ),
    "more ranks": (None, "ranks = 3", Said.NO, "world of 2"),
    "another collective": (other_kind, FEW, Said.NO, "broadcast"),
    "not every step": (few_collectives, FEW, Said.NO, "over 20 steps"),
    "links that were not kept": (gpu_links, FEW, Said.NOT_SHOWN, "0 could be compared"),
    "no privacy accounting": (None, EPSILON, Said.NOT_SHOWN, "no privacy accounting"),
    "privacy that is kept": (private("7.9"), EPSILON, Said.YES, "7.9"),
    "too much privacy spent": (private("8.1"), EPSILON, Said.NO, "8.1"),
    "too large a delta": (private("1", "0.1"), EPSILON, Said.NO, "0.1"),
    "privacy without a number": (private("small"), EPSILON, Said.NOT_SHOWN, "no numbers"),
    "privacy that is not finite": (private("-Infinity"), EPSILON, Said.NOT_SHOWN, "no numbers"),
    "cut off": (unended, "no_gaps = true", Said.NO, "not final"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer(name: str, tmp_path: Path) -> None:
    change, text, wanted, words = CASES[name]
    made = small()
    if change is not None:
        change(made)
    said, why = answer(tmp_path, made, text)
    assert said is wanted, why
    assert words in why


def test_a_run_without_a_believed_interval_shows_nothing(tmp_path: Path) -> None:
    made = small()
    made.turns.clear()
    result = asked(tmp_path, made, WHOLE.replace("version = 1", ""))
    assert {one.said for one in result.answers} == {Said.NOT_SHOWN}
    assert result.status is Status.NOT_SHOWN


def test_ranks_that_hold_parts_of_one_model_read_the_same_samples(tmp_path: Path) -> None:
    made = MadeRun(world=4, count=2)
    for rank in range(4):
        data: dict[str, Any] = {"share": Share(8, rank // 2 * 4, 4)}
        made.each(rank, lambda one, data=data: replace(one, data=[replace(one.data[0], **data)]))
    said, _ = answer(tmp_path, made, DATA)
    assert said is Said.YES


def test_a_run_that_recovers_reads_samples_again(tmp_path: Path) -> None:
    """In its second interval the run goes back to the checkpoint of step 10."""
    made = MadeRun(world=2, count=3)
    for rank in range(2):
        again = made.turns[rank, 1]
        late = replace(again, sequence=2, final=True, checkpoints_in=[checkpoint(10)])
        made.turns[rank, 2] = replace(
            late,
            links=made.turns[rank, 2].links,
            collectives=made.turns[rank, 2].collectives,
        )
    result = asked(tmp_path, made, f"no_gaps = true\n{DATA}")
    assert [one.said for one in result.answers] == [Said.YES, Said.YES], result.findings
