"""What a machine can do, as a TOML file in which every figure says where it comes from.

A profile has a device and up to three ways of bringing bytes from rank to rank: `plain` (torch's
own backend), `cc` (what today's GPU-TEEs do) and `sealed` (sealring). Networks between hosts are
files of their own, since they go with any machine.
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
    """What computing and engines share: cores, or GPUs."""
    memory_bytes: Figure
    """Of a GPU, which is one rank's; of a host, which its ranks share."""
    fp32_flops: Figure
    bf16_flops: Figure
    efficiency: Figure
    """The part of them that training reaches."""
    memory_bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class Route:
    """One way. A rate of 0 means that the engine has no such work to do."""

    call_s: Figure
    """Per collective, on top of its records."""
    prepared_s: Figure
    """What a call saves of that where it waits for its result, is no longer than
    limits.PREPARED_BYTES and is like an earlier one."""
    seal_bytes_per_s: Figure
    open_bytes_per_s: Figure
    reduce_bytes_per_s: Figure
    copy_bytes_per_s: Figure
    send_s: Figure
    """Of the engine, per record."""
    receive_s: Figure
    turn_s: Figure
    """Of the engine, where ranks share cores, whenever it has run out of records: it then gives its
    core to another rank, and comes back to caches that this one has used (Sharing.turns)."""
    inside_latency_s: Figure
    inside_bytes_per_s: Figure
    inside_push_bytes_per_s: Figure
    inside_forward_bytes_per_s: Figure
    inside_pull_bytes_per_s: Figure
    between_latency_s: Figure
    """On top of the network's."""
    between_engine_bytes_per_s: Figure
    """At which the engine moves bytes to and from a socket."""
    record_bytes: Figure
    """0: each chunk travels as one message."""
    overlaps: Figure
    """1: runs beside backward. 0: backward waits."""
    core_share: Figure
    """How much of a core (a GPU) an engine that is at work takes from computing."""


@dataclass(frozen=True, slots=True)
class Network:
    name: str
    about: str
    latency_s: Figure
    bytes_per_s: Figure
    """Of each rank, in each direction."""


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    about: str
    network: str
    """Between hosts, unless the user names another."""
    device: Device
    plain: Route
    cc: Route | None
    sealed: Route | None

    def way(self, way: Way) -> Route | None:
        return {"plain": self.plain, "cc": self.cc, "sealed": self.sealed}[way]

    def ways(self) -> list[Way]:
        return [way for way in WAYS if self.way(way) is not None]


def route_of(**figures: Figure) -> Route:
    """A route in which only these have a part."""
    nothing = {field.name: NOTHING for field in dataclasses.fields(Route)}
    return Route(**{**nothing, **figures})


def with_figures(profile: Profile, way: Way, source: str, **values: float) -> Profile:
    """The same with other figures in one way, all from one source."""
    route = profile.way(way)
    assert route is not None
    figures = {name: Figure(value, source) for name, value in values.items()}
    routes: dict[str, Route | None] = {each: profile.way(each) for each in WAYS}
    routes[way] = dataclasses.replace(route, **figures)
    plain = routes["plain"]
    assert plain is not None
    return dataclasses.replace(profile, plain=plain, cc=routes["cc"], sealed=routes["sealed"])


def costs_of(path: Route, network: Network, turns: float = 0.0) -> Costs:
    """`turns`: how many of the route's pass before an engine takes up a record; 0: it has a core
    for itself."""
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
    """For so many ranks on each host."""
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
    """By name, or the path of a TOML file of one's own."""
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
    """TOML writes 8 where it means 8.0; every number here is a figure's value."""

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
