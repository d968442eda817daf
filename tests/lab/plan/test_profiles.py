"""Every figure of a profile has a source; a file without one is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sealring.errors import ConfigurationError
from sealring.lab.plan.profiles import (
    Figure,
    costs_of,
    cutting_of,
    load_network,
    load_profile,
    network_names,
    profile_names,
    read_network,
    read_profile,
)

MINE = (
    Path(__file__).parents[3] / "src/sealring/lab/plan/figures/machines/h100-cc.toml"
).read_text()


def test_these_profiles_and_networks_are_there() -> None:
    assert profile_names() == ["b300-cc", "h100-cc", "h200-cc", "h200-sealring"]
    assert network_names() == ["100gbe", "ndr400", "wan"]


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert load_network(profile.network)
    for holder in (profile.device, *(profile.way(way) for way in profile.ways())):
        assert holder is not None
        for field in dataclasses.fields(holder):
            figure = getattr(holder, field.name)
            if isinstance(figure, Figure):
                assert len(figure.source) > 4, field.name


def test_the_published_path_is_slower_than_none_and_than_the_kernels() -> None:
    profile = load_profile("h100-cc")
    assert profile.cc is not None
    assert profile.sealed is not None
    assert profile.cc.seal_bytes_per_s.value < profile.sealed.seal_bytes_per_s.value
    costs = costs_of(profile.cc, load_network("ndr400"))
    assert costs.seal == pytest.approx(1 / 3.03e9)
    assert cutting_of(profile, "cc", 4).segments(1 << 30, 4) == 1


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('kind = "gpu"', 'kind = "tpu"', "mine: device: kind is not what a profile has there"),
        ("[plain]", "[open]", "mine is not what a profile has there"),
        ("value = 80e9", "value = -80e9", "mine: device: memory_bytes: value is not"),
        ("value = 80e9", 'value = "80e9"', "mine: device: memory_bytes: value is not"),
        ("value = 80e9, source", "value = 80e9, origin", "mine: device: memory_bytes is not"),
        ("cores_per_host = { value = 8", "cores_per_host = { value = 0", "cores_per_host is 0: n"),
        ("efficiency = { value = 0.40", "efficiency = { value = 0", "efficiency is 0: nothing"),
        ("value = 80e9", "value = inf", "mine: device: memory_bytes: value is not"),
        ("[plain]", "[plain", "mine is not TOML"),
    ],
)
def test_a_profile_with_a_mistake_is_refused(old: str, new: str, sentence: str) -> None:
    assert old in MINE
    with pytest.raises(ConfigurationError, match=sentence):
        read_profile(MINE.replace(old, new, 1), "mine")


def test_a_network_that_carries_nothing_is_refused() -> None:
    folder = Path(__file__).parents[3] / "src/sealring/lab/plan/figures/networks"
    text = (folder / "wan.toml").read_text().replace("1.17e9", "0")
    with pytest.raises(ConfigurationError, match="less than a byte a second carries nothing"):
        read_network(text, "mine")


def test_a_profile_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace('name = "h100-cc"', 'name = "mine"', 1))
    assert load_profile(str(path)).name == "mine"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_profile(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigurationError, match="'h9' is not a profile; there is b300-cc, "):
        load_profile("h9")
    with pytest.raises(ConfigurationError, match="'token ring' is not a network; there is 100gbe"):
        load_network("token ring")
