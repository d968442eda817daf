"""What the profile of published figures predicts for experiments that others have published.

Nothing is fitted to the results that it is compared with. Where the two differ, the difference says
which of the published micro-benchmarks cannot be what that experiment ran on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import CAPS_MB, Question, reckoned
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.layouts import ITEMSIZE, Setting, buckets_of, ddp_step
from sealring.lab.plan.models import load_model
from sealring.lab.plan.profiles import Way, load_network, load_profile

EXPERIMENTS: Final = ("2501.11771",)
PAPER: Final = {"25": 41.6, "best": 3.03}
"""GPT-2-XL on four GPU-TEEs against none: arXiv 2501.11771v3, abstract."""


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    bucket_mb: float
    all_reduces: int
    plain_s: float
    protected_s: float
    predicted: float
    published: float
    sealed: float
    """sealring's kernels in place of the published path, in the same setting."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    experiment: str
    rows: list[Row]
    messages: list[int]
    """Per rank and step, in each row's case."""
    sent_bytes: float
    """Per rank and step."""
    implied_message_s: float
    implied_bytes_per_s: float
    """With which T = message x messages + bytes / rate would give both published figures."""
    assumed_message_s: float
    assumed_bytes_per_s: float
    at_stake: list[str]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def reproduce(experiment: str) -> Reproduction:
    if experiment not in EXPERIMENTS:
        raise ConfigurationError(f"known experiments: {', '.join(EXPERIMENTS)}, not {experiment!r}")
    profile, model = load_profile("h100-cc"), load_model("gpt2-xl")
    network = load_network(profile.network)
    question = Question(model, profile, network, 4, 4, model.batch, "fp32")
    compute, size = reckoned(question), ITEMSIZE["fp32"]
    cluster = Cluster(4, 4)

    def seconds(way: Way, cap: float | None) -> float:
        buckets = buckets_of(model, cap, size)
        return ddp_step(Setting(profile, way, network, cluster), compute, buckets).seconds

    caps: list[float | None] = [None, *CAPS_MB]
    best = min(caps, key=lambda cap: seconds("cc", cap))
    rows, messages = [], []
    for case, cap in (("25", None), ("best", best)):
        # The paper compares with DDP as it is without protection: its default buckets.
        plain, protected = seconds("plain", None), seconds("cc", cap)
        count = len(buckets_of(model, cap, size))
        rows.append(
            Row(
                case,
                25.0 if cap is None else cap,
                count,
                plain,
                protected,
                protected / plain,
                PAPER[case],
                seconds("sealed", cap) / plain,
            )
        )
        messages.append(count * 2 * (cluster.ranks - 1))
    sent = 2 * (cluster.ranks - 1) / cluster.ranks * model.count * size
    route = profile.cc
    assert route is not None
    plain = rows[0].plain_s
    message = (PAPER["25"] - PAPER["best"]) * plain / (messages[0] - messages[1])
    per_byte = max(1e-15, (PAPER["best"] - 1) * plain - message * messages[1]) / sent
    each = 1 / (1 / route.seal_bytes_per_s.value + 1 / route.open_bytes_per_s.value)
    return Reproduction(
        experiment,
        rows,
        messages,
        sent,
        message,
        1 / per_byte,
        route.send_s.value + route.receive_s.value,
        each,
        _at_stake(rows, message, 1 / per_byte, route.send_s.value + route.receive_s.value, each),
    )


def _at_stake(
    rows: list[Row], message: float, rate: float, assumed_message: float, assumed_rate: float
) -> list[str]:
    found = []
    if rate > 2 * assumed_rate:
        found.append(
            f"The rate. Copies through the bounce buffer were published at "
            f"{assumed_rate * 2 / 1e9:.2f} GB/s each way, {assumed_rate / 1e9:.2f} GB/s there and "
            f"back by one thread. {rows[1].published}x at the best bucket leaves no more than "
            f"{(rows[1].published - 1) * rows[0].plain_s:.2f} s for all bytes, which is "
            f"{rate / 1e9:.0f} GB/s: the experiment's bytes did not pass a bounce buffer of that "
            "rate, or its plain step took longer than ours."
        )
    if message > 2 * assumed_message:
        found.append(
            f"The cost of a message. Two copies were published at {assumed_message * 1e6:.0f} us; "
            f"the distance from {rows[0].published}x to {rows[1].published}x, for "
            f"{rows[0].all_reduces - rows[1].all_reduces} all-reduces fewer, needs "
            f"{message * 1e3:.1f} ms a message: launches, synchronisation and a tag chain per "
            "message that no micro-benchmark of a copy has in it."
        )
    found.append(
        f"The plain step. It is reckoned here from 1,024 tokens a GPU at 40 % of TF32's peak, "
        f"{rows[0].plain_s * 1e3:.0f} ms. The abstract names neither batch nor precision; both "
        "ratios shrink in proportion as the plain step grows."
    )
    return found
