"""Emulates today's GPU-TEE path, in which the GPU's driver protects the data, to measure its cost.

With NVIDIA's confidential computing, all data that leaves a GPU goes through a bounce buffer in
untrusted memory, sealed and opened with AES-256-GCM. A ring all-reduce does this at every sub-step:
the sender seals a chunk, the receiver opens it, and only then the next sub-step can begin. This
module emulates that path as far as possible without such a GPU:

bounce buffer   each chunk is sealed into a buffer, sent from it, received into another, opened
one thread      AES-256-GCM by the one CPU thread that runs the collective
one tag         per message, so that authentication is one chain from the first byte to the last
no overlap      seal, then transfer, then open, then reduce; the backward pass waits meanwhile
per copy        a fixed time for each copy into or out of the bounce buffer

The AES is real, by sealring's native code, and so are the bytes that Gloo sends. The fixed time is
a busy wait. This path is only for measurements: nothing outside bench/ can use it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from sealring import _native, limits
from sealring.errors import WorkerFailed

if TYPE_CHECKING:
    import torch

COPY_US: Final = 19.85
"""A copy of 64 bytes took 21.9 µs with confidential computing on and 2.05 µs with it off (one H100,
data published with ISPASS 2025). Both ends of an exchange copy."""

SOURCES: Final = (
    ("every sub-step of the ring is sealed and opened", "arXiv 2501.11771"),
    ("one CPU thread, one tag chain, decryption after transfer", "arXiv 2410.15240"),
    (
        f"{COPY_US} µs more for each copy than without protection",
        "ISPASS 2025, measured on an H100",
    ),
)
"""What is emulated, and the publication that describes it."""


class CcRing:
    """All-reduce over a ring of sealed chunks, for the ranks of one Gloo group."""

    def __init__(self, gloo: Any, link_keys: list[bytes], copy_us: float) -> None:
        """`link_keys[r]` is the key of the link from rank r to the next rank."""
        import torch.distributed as dist

        self._gloo = gloo
        self._rank, self._world = dist.get_rank(gloo), dist.get_world_size(gloo)
        self._sealing = _native.Cipher(link_keys[self._rank])
        self._opening = _native.Cipher(link_keys[self._rank - 1])
        self._copy_s = copy_us * 1e-6
        self._staging: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.spent_s = {"seal": 0.0, "transfer": 0.0, "open": 0.0, "reduce": 0.0}
        self.all_reduces = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the ranks' contiguous tensors in place."""
        self.all_reduces += 1
        flat = tensor.view(-1)
        chunk = -(-flat.numel() // self._world)
        parts = [flat[at * chunk : (at + 1) * chunk] for at in range(self._world)]
        for step in range(2 * (self._world - 1)):
            into = parts[(self._rank - step - 1) % self._world]
            values = self.exchange(parts[(self._rank - step) % self._world], into.nbytes)
            start = time.perf_counter()
            if step < self._world - 1:
                into.add_(values.view(into.dtype))
            else:
                into.copy_(values.view(into.dtype))
            self._count("reduce", start)

    def average(self, bucket: Any) -> Any:
        """DDP's communication hook: averages a bucket of gradients, synchronously."""
        import torch

        tensor = bucket.buffer()
        tensor.div_(self._world)
        self.all_reduce(tensor)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tensor)
        return done

    def exchange(self, sent: torch.Tensor, expected: int) -> torch.Tensor:
        """Sends a chunk to the next rank; returns the opened chunk of the previous rank."""
        import torch.distributed as dist

        leaving, arriving, opened = self._buffers(max(sent.nbytes, expected))
        start = time.perf_counter()
        self._sealing.seal(sent.data_ptr(), sent.nbytes, leaving.data_ptr())
        self._copy()
        start = self._count("seal", start)
        outgoing = leaving[: sent.nbytes + limits.TAG_BYTES]
        incoming = arriving[: expected + limits.TAG_BYTES]
        following, preceding = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        work = dist.isend(outgoing, group=self._gloo, group_dst=following)
        dist.recv(incoming, group=self._gloo, group_src=preceding)
        if work is not None:
            work.wait()
        start = self._count("transfer", start)
        if not self._opening.open(arriving.data_ptr(), expected, opened.data_ptr()):
            raise WorkerFailed("the emulated path received what its sender did not send")
        self._copy()
        self._count("open", start)
        return opened[:expected]

    def _copy(self) -> None:
        until = time.perf_counter() + self._copy_s
        while time.perf_counter() < until:
            pass

    def _count(self, part: str, start: float) -> float:
        now = time.perf_counter()
        self.spent_s[part] += now - start
        return now

    def _buffers(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bounce buffers of both directions, and the buffer for an opened chunk."""
        import torch

        if self._staging is None or self._staging[2].nbytes < nbytes:
            sealed = nbytes + limits.TAG_BYTES
            leaving, arriving, opened = (
                torch.zeros(count, dtype=torch.uint8) for count in (sealed, sealed, nbytes)
            )
            self._staging = leaving, arriving, opened
        return self._staging


def make_ring(gloo: Any, copy_us: float = COPY_US) -> CcRing:
    """Makes the ring; all ranks of the sealed default group call it. Keys are sent over that
    group."""
    import torch.distributed as dist

    keys: list[bytes] = [b""] * dist.get_world_size()
    if dist.get_rank() == 0:
        keys = [os.urandom(limits.KEY_BYTES) for _ in keys]
    dist.broadcast_object_list(keys, 0)
    return CcRing(gloo, keys, copy_us)
