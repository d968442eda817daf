"""Shows, inside every rank, that the groups under test are really sealring's.

The suite was imported under another backend's name (see suite.py), so it is not enough that a case
passed: the default group's type is checked, and what its groups sealed is counted.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.outcome import Evidence

_sealed: list[Any] = []
_gloo: list[None] = []


def watch_groups() -> None:
    """Called in a rank before its test: every group it makes from now on is remembered."""
    import torch.distributed.distributed_c10d as c10d

    import sealring.core.group.create as create

    make_sealed, make_gloo = create.create_group, c10d.ProcessGroupGloo

    def sealed_group(options: Any) -> Any:
        group = make_sealed(options)
        _sealed.append(group)
        return group

    class WatchedGloo(make_gloo):  # type: ignore[valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            _gloo.append(None)
            super().__init__(*arguments, **options)

    create.create_group = sealed_group
    c10d.ProcessGroupGloo = WatchedGloo


def check_default_group() -> None:
    import torch.distributed as dist

    from sealring.core.group.process_group import SealedProcessGroup

    group = dist.distributed_c10d._get_default_group()
    if type(group) is not SealedProcessGroup:
        raise AssertionError(f"the default group is a {type(group).__name__}, not sealring's")


def collected() -> Evidence:
    accounts = [group.account() for group in _sealed]
    return Evidence(
        ranks=int(bool(_sealed)),
        sealed_records=sum(account["sealed_records"] for account in accounts),
        sealed_bytes=sum(account["sealed_bytes"] for account in accounts),
        gloo_groups=len(_gloo),
    )


def added(parts: list[Evidence]) -> Evidence:
    return Evidence(
        ranks=sum(part.ranks for part in parts),
        sealed_records=sum(part.sealed_records for part in parts),
        sealed_bytes=sum(part.sealed_bytes for part in parts),
        gloo_groups=sum(part.gloo_groups for part in parts),
    )
