"""Data at rest: sealed files, the keys that open them, and checkpoints made of them.

closing            what close() means: keys wiped, and an error for every later use
files, sealed      what survives a crash; sealed files by the native core
digests            SHA-256 or BLAKE3 of each chunk: what is signed
storage, stores    where a vault lies: a directory, or a store that fsspec reaches
requests           questions to a store in bounded time, and what its answers prove
keys, header       who opens a vault, and its list of grants
opened             a header while a process has it open, and how its keys change
objects, vault     versions of a name as files, and the directory of them
ledger             by which a rollback is seen
trees              files and folders in and out; rotation

signing            what a rank vouches for
checkpoint_form    tensors and other entries as bytes
checkpoint_check   what makes a checkpoint valid
checkpoint_writer, checkpoint_reader  torch.distributed.checkpoint's storage
staging            sealing in a process of its own
checkpoint_export  other forms of checkpoints
movement, resharding  another layout between running workers, without a disk

gpu_batches        ciphertext from the disk to a GPU, which opens it
children           processes of this one, and how they get keys
datasets           sealed shards, read in one order by any number of ranks
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sealring.vault.datasets.stages import Stage
from sealring.vault.keys import identity, key_file, released_key
from sealring.vault.vault import Vault

if TYPE_CHECKING:
    from sealring.vault.checkpoint_export import (
        export_safetensors,
        export_torch,
        import_safetensors,
    )
    from sealring.vault.checkpoint_reader import CheckpointReader
    from sealring.vault.checkpoint_writer import CheckpointWriter
    from sealring.vault.datasets.dataset import Dataset, Loader, Stream
    from sealring.vault.datasets.gpu_loader import GpuLoader
    from sealring.vault.gpu_batches import CudaOpener, GpuBatches, Sample, SealedPart
    from sealring.vault.resharding import Moved, reshard

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "CudaOpener",
    "Dataset",
    "GpuBatches",
    "GpuLoader",
    "Loader",
    "Moved",
    "Sample",
    "SealedPart",
    "Stage",
    "Stream",
    "Vault",
    "export_safetensors",
    "export_torch",
    "identity",
    "import_safetensors",
    "key_file",
    "released_key",
    "reshard",
]

_WITH_TORCH: Final = {
    "CheckpointReader": "checkpoint_reader",
    "CheckpointWriter": "checkpoint_writer",
    "CudaOpener": "gpu_batches",
    "Dataset": "datasets.dataset",
    "GpuBatches": "gpu_batches",
    "GpuLoader": "datasets.gpu_loader",
    "Loader": "datasets.dataset",
    "Moved": "resharding",
    "Sample": "gpu_batches",
    "SealedPart": "gpu_batches",
    "Stream": "datasets.dataset",
    "export_safetensors": "checkpoint_export",
    "export_torch": "checkpoint_export",
    "import_safetensors": "checkpoint_export",
    "reshard": "resharding",
}
"""Imported on first use: `sealring vault` needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
