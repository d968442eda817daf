"""Sealing a rank's part: in this process, or in a helper that gets the part's key alone.

The helper is this file: python -P -m sealring.vault.staging ADDRESS. It starts with nothing secret
(see children.py), gets two files, the staged plaintext and the one to write, and answers with the
commitment.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from typing_extensions import Buffer

from sealring import _native
from sealring.core.identity.process import shut_out_debuggers
from sealring.errors import WorkerFailed
from sealring.vault.children import Child, serve
from sealring.vault.digests import Hash, computed
from sealring.vault.objects import Copy, Part, digest_of
from sealring.vault.sealed import Progress, SealedPlace

WORK_SECONDS: Final = 120.0
"""For a helper to seal a part and to answer, and longer by the part's size."""
_BYTES_A_SECOND: Final = 1 << 20
"""A helper that seals more slowly than this does not work."""
_COMMITMENT: Final = re.compile(r"[0-9a-f]{64}")


def seal_here(copy: Copy, name: str, buffers: Sequence[Buffer], hash: Hash) -> tuple[Part, bytes]:
    """The part, and the digests of its chunks."""
    return copy.seal_part(name, [buffers], hash)


def seal_in_helper(
    copy: Copy, name: str, buffers: Sequence[Buffer], hash: Hash
) -> tuple[Part, bytes]:
    """Stages the bytes in memory that only the two processes share, and hands over one key.

    The helper knows neither the vault's key, nor the checkpoint's, nor the rank's identity: this
    process computes the digests of what it staged, and signs them.
    """
    shut_out_debuggers()  # before the plaintext is staged
    views = [memoryview(one) for one in buffers]
    size = sum(view.nbytes for view in views)
    memory = os.memfd_create("sealring-staging", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, max(1, size))
        with mmap.mmap(memory, max(1, size)) as staged:
            at = 0
            for view in views:
                staged[at : at + view.nbytes] = view
                at += view.nbytes
            with memoryview(staged) as whole:
                digests = _native.chunk_digests(whole[:size], computed(hash))
        with copy.new_part(name) as target:
            commitment = _sealed_by_helper(copy, name, size, [memory, target])
        return Part(name, size, commitment, hash, digest_of(digests)), digests
    finally:
        os.close(memory)


def _sealed_by_helper(copy: Copy, name: str, size: int, files: list[int]) -> str:
    """The part's commitment, from a helper that an attacker may have taken over."""
    order = {"part": name, "place": asdict(copy.place.of(name)), "bytes": size}
    helper = Child("sealring.vault.staging")
    try:
        made = helper.ask(
            order, [copy.place.part_key(name)], files=files,
            seconds=WORK_SECONDS + size / _BYTES_A_SECOND,
        )  # fmt: skip
    finally:
        helper.close()
    if not isinstance(made, str) or not _COMMITMENT.fullmatch(made):
        raise WorkerFailed(f"the process that seals {name} gave an answer that is none")
    return made


def _seal(
    order: dict[str, Any], keys: list[_native.Secret], files: list[int], progress: Progress
) -> str:
    """In the helper."""
    memory, target = files
    writer = SealedPlace(**order["place"]).writer(target, keys[0])
    if size := order["bytes"]:
        with mmap.mmap(memory, size, prot=mmap.PROT_READ) as staged, memoryview(staged) as plain:
            writer.write([plain])
    writer.finish()
    os.fsync(target)
    return writer.commitment.hex()


if __name__ == "__main__":
    serve(sys.argv[1], _seal)
