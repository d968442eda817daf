"""Opens chunks of sealed files in a GPU's memory: many chunks a launch.

The GPU holds the files' keys. Ciphertext comes to it as it lies on the disk; a chunk is
authenticated before anything of it is written.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from sealring import _native
from sealring.engine.cuda import compiler
from sealring.engine.cuda.driver import Kernel
from sealring.engine.cuda.streams import new_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES: Final = 16384
SEALED_CHUNK_BYTES: Final = CHUNK_BYTES + 16
FIRST_CHUNK_AT: Final = 56
# The structs of open_chunks.cu.
CHUNK: Final = np.dtype(
    [("from", "<u8"), ("to", "<u8"), ("number", "<u8"), ("bytes", "<u4"), ("file", "<u4")]
)
_OPENING: Final = struct.Struct("<QQQQQII")
_THREADS: Final = 128
NO_FAILURE: Final = -1


class ChunkKernels:
    """The kernel of one GPU, with the keys of up to so many files."""

    def __init__(self, device: torch.device, files: int) -> None:
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", ordinal)
        code = compiler.code_for(ordinal, (), compiler.kernel_text(compiler.CHUNKS))
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # the context exists from now on
            self._kernel = Kernel(code, "open_chunks")
            self._lists = new_stream(self._device)
            self._keys = _native.GpuKeys(ordinal, max(1, files))
        self._added = 0

    def add(self, file: _native.SealedFileReader) -> int:
        """The number by which chunks name this file."""
        self._keys.add_file(file)
        self._added += 1
        return self._added - 1

    def open(
        self,
        sealed: torch.Tensor,
        chunks: NDArray[np.void],
        plain: torch.Tensor,
        failed: torch.Tensor,
    ) -> torch.Tensor:
        """Opens into `plain` on the current stream.

        `failed` gets the place of a chunk that is not authentic; it holds NO_FAILURE before.
        What is returned must live until the stream has passed this.
        """
        # From memory that is not pinned: where the GPU is confidential, the driver encrypts it. It
        # says which key opens what, so no other process may write it. CUDA waits for the stream of
        # such a copy, so it has one of its own, where nothing else is queued.
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._lists):
            listed = torch.from_numpy(chunks.view(np.uint8)).to(self._device, non_blocking=True)
        stream.wait_stream(self._lists)
        listed.record_stream(stream)
        argument = _OPENING.pack(
            sealed.data_ptr(), plain.data_ptr(), listed.data_ptr(), self._keys.start,
            failed.data_ptr(), 1, 0,
        )  # fmt: skip
        if len(chunks):
            self._kernel.launch(len(chunks), _THREADS, 1, argument, stream.cuda_stream)
        return listed

    def wipe(self) -> None:
        """Overwrites the keys. Wait for launches that use them first."""
        self._keys.wipe()
