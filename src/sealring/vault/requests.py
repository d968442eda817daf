"""Requests to a store, through fsspec's client for it. Each ends in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from sealring.errors import StoreFailed
from sealring.vault import answers

SILENT_SECONDS: Final = 120.0
"""A request may take so long, with its client's repetitions, and longer by its size:"""
_BYTES_A_SECOND: Final = 1 << 18


def can_be_stopped(files: Any) -> bool:
    """Whether the client runs in fsspec's loop, as those of stores on a network do."""
    from fsspec.asyn import AsyncFileSystem

    return isinstance(files, AsyncFileSystem)


def ask(files: Any, url: str, size: int, method: str, *args: Any, **options: Any) -> Any:
    """Calls a method of the client, for `size` bytes. What is not answered is stopped.

    Clients repeat requests: s3fs waits for more than six minutes for a server that says nothing.
    A request that is not stopped could put something after its caller has gone on without it.
    """
    if not can_be_stopped(files):
        return getattr(files, method)(*args, **options)
    from fsspec.asyn import sync

    seconds = SILENT_SECONDS + size / _BYTES_A_SECOND

    async def bounded() -> Any:
        answers.wanted.set(size)
        try:
            return await asyncio.wait_for(getattr(files, f"_{method}")(*args, **options), seconds)
        except TimeoutError:
            raise StoreFailed(
                f"{url} did not answer within {seconds:.0f} seconds: try again later"
            ) from None

    return sync(files.loop, bounded)


def condition_failed(problem: BaseException | None) -> bool:
    """Whether a store refused a request because its condition did not hold (HTTP's 412).

    s3fs knows that only from stores that name the condition, as AWS does.
    """
    while problem is not None:
        answer = getattr(problem, "response", None)
        if isinstance(answer, dict):
            return answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412  # type: ignore[no-any-return]
        problem = problem.__cause__
    return False


def telling(progress: Callable[[int], None]) -> Any:
    """What fsspec tells how many bytes it has sent."""
    from fsspec.callbacks import Callback

    class Telling(Callback):  # type: ignore[misc]  # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            progress(inc)

    return Telling()
