"""Profiles of machines: TOML files in which every figure names its source.

A profile has a device and up to three ways to send bytes from rank to rank: `plain` (torch's own
backend), `cc` (today's GPU-TEEs) and `sealed` (sealring). Networks between hosts are separate
files, because they can be combined with any machine.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from sealring.core.engine.lanes import threads_by_default
from sealring.errors import ConfigurationError
from sealring.formats.strict import strictly
from sealring.lab.plan.collectives import Costs, Cutting, Hop

Way = Literal["plain", "cc", "sealed"]
WAYS: Final[tuple[Way, ...]] = ("plain", "cc", "sealed")


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    source: str


NOTHING: Final = Figure(0.0, "not part of this way")


@dataclass(frozen=True, slots=True)
class Device:
    kind: Literal["cpu", "gpu"]
    ranks_per_host: Figure
    cores_per_host: Figure
    """The cores, or GPUs, that computing and engines share."""
    memory_bytes: Figure
    """The memory of a GPU, which one rank uses, or of a host, which its ranks share."""
    fp32_flops: Figure
    bf16_flops: Figure
    efficiency: Figure
    """The part of the flops that training reaches."""
    memory_bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class Route:
    """The costs of one way. A rate of 0 means that the engine does not do this work."""

    call_s: Figure
    """Seconds per collective, besides those of its records."""
    prepared_s: Figure
    """The part of call_s that a prepared call saves: one that waits for its result, has at most
    limits.PREPARED_BYTES, and is like an earlier call."""
    seal_bytes_per_s: Figure
    open_bytes_per_s: Figure
    reduce_bytes_per_s: Figure
    copy_bytes_per_s: Figure
    send_s: Figure
    """Seconds of the engine per record."""
    receive_s: Figure
    turn_s: Figure
    """If ranks share cores: seconds of the engine whenever it has run out of records. It then gives
    its core to another rank, and later finds the caches changed (Sharing.turns)."""
    inside_latency_s: Figure
    inside_bytes_per_s: Figure
    inside_push_bytes_per_s: Figure
    inside_forward_bytes_per_s: Figure
    inside_pull_bytes_per_s: Figure
    between_latency_s: Figure
    """Latency added to the network's."""
    between_engine_bytes_per_s: Figure
    """The rate at which the engine moves bytes to and from a socket."""
    record_bytes: Figure
    """The size of a record; 0: each chunk is one message."""
    overlaps: Figure
    """1 if exchanges run while backward computes; 0 if backward waits."""
    core_share: Figure
    """The part of a core (or GPU) that a working engine takes from computing."""


@dataclass(frozen=True, slots=True)
class Network:
    name: str
    about: str
    latency_s: Figure
    bytes_per_s: Figure
    """The rate of each rank, in each direction."""


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    about: str
    network: str
    """The default network between hosts."""
    device: Device
    plain: Route
    cc: Route | None
    sealed: Route | None

    def way(self, way: Way) -> Route | None:
        return {"plain": self.plain, "cc": self.cc, "sealed": self.sealed}[way]

    def ways(self) -> list[Way]:
        return [way for way in WAYS if self.way(way) is not None]


def route_of(**figures: Figure) -> Route:
    """Makes a route with these figures; all others are NOTHING."""
    nothing = {field.name: NOTHING for field in dataclasses.fields(Route)}
    return Route(**{**nothing, **figures})


def with_figures(profile: Profile, way: Way, source: str, **values: float) -> Profile:
    """Returns the profile with changed figures in one way, which all have one source."""
    route = profile.way(way)
    assert route is not None
    figures = {name: Figure(value, source) for name, value in values.items()}
    routes: dict[str, Route | None] = {each: profile.way(each) for each in WAYS}
    routes[way] = dataclasses.replace(route, **figures)
    plain = routes["plain"]
    assert plain is not None
    return dataclasses.replace(profile, plain=plain, cc=routes["cc"], sealed=routes["sealed"])


def costs_of(path: Route, network: Network, turns: float = 0.0) -> Costs:
    """The costs of a route over a network. `turns` is how many times turn_s passes before an idle
    engine begins with a record; 0 if it has its own core."""
    between = _inverse(path.between_engine_bytes_per_s)
    ends = {"engine_send_s": path.send_s.value, "engine_receive_s": path.receive_s.value}
    return Costs(
        seal=_inverse(path.seal_bytes_per_s),
        open=_inverse(path.open_bytes_per_s),
        reduce=_inverse(path.reduce_bytes_per_s),
        copy=_inverse(path.copy_bytes_per_s),
        turn_s=path.turn_s.value * turns,
        inside=Hop(
            path.inside_latency_s.value,
            _inverse(path.inside_bytes_per_s),
            engine_push_s_per_byte=_inverse(path.inside_push_bytes_per_s),
            engine_forward_s_per_byte=_inverse(path.inside_forward_bytes_per_s),
            engine_pull_s_per_byte=_inverse(path.inside_pull_bytes_per_s),
            **ends,
        ),
        between=Hop(
            network.latency_s.value + path.between_latency_s.value,
            _inverse(network.bytes_per_s),
            engine_push_s_per_byte=between,
            engine_forward_s_per_byte=between,
            engine_pull_s_per_byte=between,
            **ends,
        ),
    )


def cutting_of(profile: Profile, way: Way, on_a_host: int) -> Cutting:
    """How the engine of a way cuts slots, with `on_a_host` ranks on each host."""
    route = profile.way(way)
    assert route is not None
    own_engine = way == "sealed" and profile.device.kind == "cpu"
    cores = int(profile.device.cores_per_host.value)
    threads = threads_by_default(cores, on_a_host) if own_engine else 1
    return Cutting(int(route.record_bytes.value), own_engine, threads)


def _inverse(rate: Figure) -> float:
    return 1.0 / rate.value if rate.value else 0.0


# ---- files


def profile_names() -> list[str]:
    return _names("machines")


def network_names() -> list[str]:
    return _names("networks")


def load_profile(name: str) -> Profile:
    """Loads a profile by its name, or from the user's TOML file."""
    text = _text("machines", name, "a profile", ", or a results.json of `sealring bench all`")
    return read_profile(text, name)


def load_network(name: str) -> Network:
    return read_network(_text("networks", name, "a network"), name)


def read_profile(text: str, name: str) -> Profile:
    document = parse_toml(text, name)
    for way in WAYS:
        given = document.get(way)
        if isinstance(given, dict):
            known = [field.name for field in dataclasses.fields(Route)]
            document[way] = {**dict.fromkeys(known, dataclasses.asdict(NOTHING)), **given}
        elif way != "plain":
            document.setdefault(way, None)
    profile = strictly(Profile, document, name, "profile")
    for field in dataclasses.fields(Device):
        figure = getattr(profile.device, field.name)
        least = 1.0 if field.name.endswith("per_host") else 1e-6
        if isinstance(figure, Figure) and figure.value < least:
            raise ConfigurationError(
                f"{name}: device: {field.name} is {figure.value:g}: nothing trains on that"
            )
    return profile


def read_network(text: str, name: str) -> Network:
    network = strictly(Network, parse_toml(text, name), name, "network")
    if network.bytes_per_s.value < 1:
        raise ConfigurationError(f"{name}: a network of less than a byte a second carries nothing")
    return network


def parse_toml(text: str, name: str) -> dict[str, Any]:
    try:
        return _as_floats(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise ConfigurationError(f"{name} is not TOML: {problem}") from None


def _as_floats(document: Mapping[str, Any]) -> dict[str, Any]:
    """Converts integers to floats: TOML may have 8 for 8.0, and every number here is a value."""

    def value(each: Any) -> Any:
        if isinstance(each, dict):
            return _as_floats(each)
        return float(each) if type(each) is int else each

    return {key: value(each) for key, each in document.items()}


def _text(folder: str, name: str, what: str, besides: str = "") -> str:
    if name in _names(folder):
        return str(_folder(folder).joinpath(f"{name}.toml").read_text())
    if not name.endswith(".toml"):
        known = ", ".join(_names(folder))
        raise ConfigurationError(
            f"{name!r} is not {what}; there is {known}, a .toml file of your own{besides}"
        )
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"{name} cannot be read: {problem}") from problem


def _names(folder: str) -> list[str]:
    names = (str(path.name) for path in _folder(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _folder(kind: str) -> Any:
    return files("sealring.lab.plan").joinpath("figures", kind)
