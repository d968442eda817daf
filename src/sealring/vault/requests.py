"""Requests to a store, through fsspec's client for it. Each ends in bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final

from sealring.errors import StoreFailed
from sealring.vault import answers

SILENT_SECONDS: Final = 120.0
"""A request may take so long, with its client's repetitions, and longer by its size:"""
_BYTES_A_SECOND: Final = 1 << 18
_STOP_SECONDS: Final = 5.0
"""For a request to end that is stopped. It does no more than close its connection."""
_MOVES_CONTENT: Final = frozenset({"cat_file", "pipe_file", "put_file"})


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
    seconds = SILENT_SECONDS + size / _BYTES_A_SECOND

    async def bounded() -> Any:
        room = answers.Room(
            size, listing=method not in _MOVES_CONTENT, absent=answers.proving_absence(files)
        )
        answers.room.set(room)
        try:
            return await asyncio.wait_for(getattr(files, f"_{method}")(*args, **options), seconds)
        except TimeoutError:
            raise StoreFailed(
                f"{url} did not answer within {seconds:.0f} seconds: try again later"
            ) from None
        except Exception as problem:
            if (meant := room.judged(url, problem)) is problem:
                raise
            raise meant from None

    return _run(files.loop, bounded())


def _run(loop: asyncio.AbstractEventLoop, request: Coroutine[Any, Any, Any]) -> Any:
    """Waits for a request in fsspec's loop. Ctrl-C stops it: fsspec's own `sync` lets it go on."""
    ended = threading.Event()
    tasks: list[asyncio.Task[Any]] = []

    def begin() -> None:
        tasks.append(loop.create_task(request))
        tasks[0].add_done_callback(lambda _: ended.set())

    loop.call_soon_threadsafe(begin)
    try:
        ended.wait()
    except BaseException:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        ended.wait(_STOP_SECONDS)
        raise
    return tasks[0].result()


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
