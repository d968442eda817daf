"""Opens chunks of sealed files on a GPU, many per launch, and makes tensors of their plaintext.

The GPU holds the files' keys and gets the ciphertext as it is on disk. It authenticates a chunk
before it writes any plaintext of that chunk.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from sealring import _native
from sealring.core.engine.cuda import compiler
from sealring.core.engine.cuda.driver import Kernel
from sealring.core.engine.streams import new_stream

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
# The structs of take_rows.cu.
ROW: Final = np.dtype([("from", "<u8"), ("bytes", "<u8"), ("item", "<i8"), ("pad", "<i8")])
_TAKING: Final = struct.Struct("<QQQQII")
_NUMBERS_OF_BLOCK: Final = 4096
NO_FAILURE: Final = -1
_NO_ROWS: Final = np.empty(0, ROW)


class Listed(NamedTuple):
    """The tables that were copied to the GPU for one call of `open`."""

    rows: torch.Tensor
    """The table of rows in the GPU's memory, as `take` expects it."""
    host: torch.Tensor
    """The tables in host memory. Keep them until the stream has passed the opening: some GPUs read
    host memory directly."""


class ChunkKernels:
    """The kernels of one GPU that open chunks and take rows, with the keys of up to `files`
    files."""

    def __init__(self, device: torch.device, files: int) -> None:
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", ordinal)
        opening, taking = (
            compiler.code_for(ordinal, (), compiler.kernel_text(main))
            for main in (compiler.CHUNKS, compiler.ROWS)
        )
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # the context exists from now on
            self._open = Kernel(opening, "open_chunks")
            self._take = Kernel(taking, "take_rows")
            self._lists = new_stream(self._device)
            self._keys = _native.GpuKeys(ordinal, max(1, files))
        self._added = 0

    def add(self, file: _native.SealedFileReader) -> int:
        """Gives the file's key to the GPU; returns the number by which chunks name this file."""
        self._keys.add_file(file)
        self._added += 1
        return self._added - 1

    def open(
        self,
        sealed: torch.Tensor,
        chunks: NDArray[np.void],
        plain: torch.Tensor,
        failed: torch.Tensor,
        rows: NDArray[np.void] = _NO_ROWS,
    ) -> Listed:
        """Opens chunks into `plain` on the current stream.

        `failed` must hold NO_FAILURE. If a chunk is not authentic, it gets that chunk's index.
        """
        # The tables say which key opens what, so no other process may write them. They are copied
        # from memory that is not pinned, because on a confidential GPU the driver encrypts such a
        # copy. CUDA waits for the stream of such a copy, so it gets an otherwise empty stream.
        stream = torch.cuda.current_stream(self._device)
        tables = torch.from_numpy(np.concatenate([chunks.view(np.uint8), rows.view(np.uint8)]))
        with torch.cuda.stream(self._lists):
            # The host does not wait: this copy may be queued behind the copy of a whole batch.
            listed = tables.to(self._device, non_blocking=True)
        stream.wait_stream(self._lists)
        listed.record_stream(stream)
        argument = _OPENING.pack(
            sealed.data_ptr(), plain.data_ptr(), listed.data_ptr(), self._keys.start,
            failed.data_ptr(), 1, 0,
        )  # fmt: skip
        if len(chunks):
            self._open.launch(len(chunks), _THREADS, 1, argument, stream.cuda_stream)
        return Listed(listed[chunks.nbytes :].view(torch.int64).view(len(rows), 4), tables)

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns a tensor with `length` numbers of type `dtype` for each row; on the current
        stream.

        The bits of a number are kept. If the stored size differs from that of `dtype`, both must be
        integer types.
        """
        made = torch.empty((len(rows), length), dtype=dtype, device=self._device)
        blocks = -(-length // _NUMBERS_OF_BLOCK)
        argument = _TAKING.pack(
            plain.data_ptr(), rows.data_ptr(), made.data_ptr(), length, dtype.itemsize, blocks
        )
        if made.numel():
            stream = torch.cuda.current_stream(self._device).cuda_stream
            # Stream 0 means the current device's default stream, and the caller's current device
            # may be another GPU.
            with torch.cuda.device(self._device):
                self._take.launch(len(rows) * blocks, _THREADS, 1, argument, stream)
        return made

    def wipe(self) -> None:
        """Overwrites the keys. Wait for launches that use them first."""
        self._keys.wipe()
