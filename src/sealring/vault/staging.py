"""Seals a rank's part, in this process or in a helper process that gets only the part's key.

The helper runs this file: python -P -m sealring.vault.staging ADDRESS. It starts without secrets
(see children.py). It gets two open files, the staged plaintext and the file to write, and answers
with the file's commitment.
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
"""How long a helper may take to seal a part and to answer, plus time for the part's size."""
_BYTES_A_SECOND: Final = 1 << 20
"""The extra time for a part's size is computed with this rate."""
_COMMITMENT: Final = re.compile(r"[0-9a-f]{64}")


def seal_here(copy: Copy, name: str, buffers: Sequence[Buffer], hash: Hash) -> tuple[Part, bytes]:
    """Seals a part in this process. Returns the part and the digests of its chunks."""
    return copy.seal_part(name, [buffers], hash)


def seal_in_helper(
    copy: Copy, name: str, buffers: Sequence[Buffer], hash: Hash
) -> tuple[Part, bytes]:
    """Seals a part in a helper process, which shares the staged plaintext and gets one key.

    The helper has neither the vault's key, nor the checkpoint's, nor the rank's identity: this
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
    """Returns the part's commitment as the helper gives it; an attacker may control the helper."""
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
    """Runs in the helper: seals the staged plaintext and returns the commitment."""
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
