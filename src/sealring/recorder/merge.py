"""Flight records of several ranks, read back from their files and put beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from sealring.engine.flight import CollectiveAccount
from sealring.errors import ConfigurationError
from sealring.recorder.account import ProcessAccount

MAX_FILE_BYTES: Final = 256 << 20

# No rank is done with one of these before all ranks have begun it.
_MEETINGS: Final = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "barrier", "all_to_all"}
)


def read_flight_records(paths: Iterable[Path]) -> list[ProcessAccount]:
    """The records in these files, and in these directories' *.flight.json, by rank."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.flight.json")) if path.is_dir() else [path]
        if not found:
            raise ConfigurationError(f"{path} holds no *.flight.json")
        files += found
    accounts = [_read(file) for file in dict.fromkeys(files)]
    if len(jobs := sorted({account.job for account in accounts})) > 1:
        raise ConfigurationError(
            f"these are flight records of different jobs ({', '.join(jobs)}): pass those of one"
        )
    processes = Counter((account.host, account.pid, account.rank) for account in accounts)
    for (host, pid, rank), count in processes.items():
        if count > 1:
            raise ConfigurationError(
                f"two of these files are of one process (rank {rank}, {host}, process {pid}): "
                "pass the later one"
            )
    return sorted(accounts, key=lambda account: (account.rank, account.written_ns))


def clock_offsets_ns(accounts: Sequence[ProcessAccount]) -> dict[int, int]:
    """How far each account's clock is ahead of the first one's, by index.

    All ranks leave an all-reduce or a barrier at nearly the same moment, so the median difference
    of those ends is the difference of the clocks, up to a part of a collective's time. A rank that
    shares none with the first is not in the answer.
    """
    ends = [_meetings(account) for account in accounts]
    offsets = {}
    for index, own in enumerate(ends):
        shared = own.keys() & ends[0].keys()
        if shared:
            offsets[index] = int(median(own[each] - ends[0][each] for each in shared))
    return offsets


def collectives_numbered(
    accounts: Iterable[ProcessAccount], number: int, group: str | None = None
) -> list[tuple[ProcessAccount, str, CollectiveAccount | None]]:
    """(process, group, what collective `number` was there) for every group, or those of a name."""
    return [
        (account, each.name, each.collective(number))
        for account in accounts
        for each in account.groups
        if group is None or each.name == group
    ]


def _meetings(account: ProcessAccount) -> dict[tuple[str, int], int]:
    return {
        (group.id, each.number): each.ended_ns
        for group in account.groups
        for each in group.collectives
        if each.operation in _MEETINGS
        and each.state == "done"
        and each.number is not None
        and each.ended_ns is not None
    }


def _read(path: Path) -> ProcessAccount:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path} is larger than any flight record")
    return ProcessAccount.from_json(content, str(path))
