"""The planner's answers: the choice, what fits, and the cost."""

from __future__ import annotations

import dataclasses

import pytest

from sealring.core.schedule import Algorithm, Operation
from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import Question, answer
from sealring.lab.plan.layouts import ClusterSetting, Compute
from sealring.lab.plan.models import load_model
from sealring.lab.plan.profiles import load_network, load_profile
from sealring.lab.plan.validate import reproduce


def question(model: str = "gpt2", profile: str = "h100-cc", ranks: int = 4) -> Question:
    known = load_profile(profile)
    loaded = load_model(model)
    return Question(loaded, known, load_network(known.network), ranks, 8, loaded.batch, "fp32")


def test_an_answer_has_every_way_and_plain_is_one() -> None:
    found = answer(question())
    assert [each.way for each in found.ways] == ["plain", "cc", "sealed"]
    assert found.ways[0].against_plain == 1.0
    assert found.layout == "ddp"
    for each in found.ways:
        assert each.seconds >= each.compute_s
        assert each.seconds <= min(row.seconds[each.way] for row in found.buckets) * 1.001


def test_the_best_bucket_is_no_worse_than_the_default() -> None:
    for each in answer(question("gpt2-large")).ways:
        assert each.default_bucket_seconds is not None
        assert each.seconds <= each.default_bucket_seconds * 1.001


def test_bytes_on_the_wire_halve_with_half_precision() -> None:
    halved = dataclasses.replace(question(), precision="bf16")
    full, half = (
        next(row.seconds["cc"] for row in answer(each).buckets if row.bucket_mb == 100.0)
        for each in (question(), halved)
    )
    assert half == pytest.approx(full / 2, rel=0.1)


def test_where_ddp_does_not_fit_the_model_is_spread() -> None:
    crowded = dataclasses.replace(question("gpt2-xl", ranks=8), batch=16)
    found = answer(crowded)
    assert [layout.layout for layout in found.layouts if not layout.fits] == ["ddp", "fsdp"]
    assert found.layout == "tp1 x pp2"
    assert found.why == "ddp needs 123.3 GB, fsdp needs 96.3 GB of 80 GB"
    assert found.ways[0].bucket_mb is None
    assert found.buckets == []


def test_fsdp_is_taken_where_only_the_weights_are_too_many() -> None:
    small = question("gpt2-xl", ranks=8)
    device = dataclasses.replace(
        small.profile.device,
        memory_bytes=dataclasses.replace(small.profile.device.memory_bytes, value=20e9),
    )
    profile = dataclasses.replace(small.profile, device=device)
    found = answer(dataclasses.replace(small, profile=profile))
    assert "ddp" not in [layout.layout for layout in found.layouts if layout.fits]
    assert found.layouts[1].layout == "fsdp"
    assert found.layouts[1].fits


def test_a_model_that_fits_nowhere_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"gpt2-xl on 1 rank needs 399\.8 GB of memory on a GPU, which has 80\.0 GB: take",
    ):
        answer(dataclasses.replace(question("gpt2-xl", ranks=1), batch=64))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 0}, "0 ranks: a job has 1 to 65536"),
        ({"ranks": 65537}, "65537 ranks: a job has 1 to 65536"),
        ({"batch": 0}, "--per-host and --batch are 1 or more"),
        ({"per_host": 0}, "--per-host and --batch are 1 or more"),
        ({"price": -1.0}, r"a price of -1\.0 per hour is none"),
        ({"price": float("nan")}, "a price of nan per hour is none"),
    ],
)
def test_a_question_without_sense_is_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        answer(dataclasses.replace(question(), **changes))  # type: ignore[arg-type]


def test_price_is_per_rank_and_hour() -> None:
    found = answer(dataclasses.replace(question(ranks=16), price=2.5))
    assert found.cost_per_day == 16 * 24 * 2.5
    for each in found.ways:
        assert each.cost_per_million_samples is not None
        hours = 1e6 / each.samples_per_s / 3600
        assert each.cost_per_million_samples == pytest.approx(hours * 16 * 2.5)


def test_a_measured_step_takes_the_place_of_arithmetic() -> None:
    slow = dataclasses.replace(question(), compute=Compute(10.0, 20.0, 0.0))
    found = answer(slow)
    assert found.ways[0].seconds == pytest.approx(30.0, rel=0.01)
    assert found.ways[2].against_plain < 1.01


def test_one_rank_sends_nothing() -> None:
    found = answer(question(ranks=1))
    for each in found.ways:
        assert each.exposed_s < 1e-3
    assert found.algorithms == []


def test_sixteen_thousand_ranks_have_an_answer() -> None:
    found = answer(question("gpt2-xl", ranks=16384))
    assert found.hosts == 2048
    assert found.parameters == 1_557_611_200
    largest = found.algorithms[-1]
    assert largest.seconds <= largest.default_seconds
    # A ring of so many hops is far slower while messages are short.
    asked = question("gpt2-xl", ranks=16384)
    ring = ClusterSetting(asked.profile, "sealed", asked.network, asked.cluster, Algorithm.RING)
    assert found.algorithms[0].algorithm == "tree"
    assert ring.takes(Operation.ALL_REDUCE, 4096).seconds > 100 * found.algorithms[0].seconds


def test_more_ranks_take_no_less_time_for_a_sealed_step() -> None:
    seconds = [answer(question("gpt2", ranks=ranks)).ways[2].seconds for ranks in (2, 4, 8)]
    assert seconds == sorted(seconds)


def test_the_published_experiment_is_predicted_from_published_figures_alone() -> None:
    found = {row.what: row.value for row in reproduce("2501.11771")}
    published = {count: found[f"{count} all-reduces: published"] for count in (145, 1)}
    assert published == {145: 41.6, 1: 3.03}
    assert found["1 all-reduces: predicted"] <= found["145 all-reduces: predicted"]
    # Values that would give both figures are stated, and they do give both.
    plain = found["plain step"]
    for count, ratio in published.items():
        messages = found[f"{count} all-reduces: messages a rank"]
        bytes_ms = found["sent by a rank"] / found["bytes, for both to be true"] * 1e3
        comm = found["a message, for both to be true"] * messages + bytes_ms
        assert (plain + comm) / plain == pytest.approx(ratio, rel=1e-6)


def test_an_unknown_experiment_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"known experiments: 2501\.11771, not '1234\.5'"):
        reproduce("1234.5")
