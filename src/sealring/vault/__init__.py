"""Data at rest: sealed files, the keys that open them, and checkpoints made of them.

closing            close() wipes the keys; every later use raises an error
files, sealed      files that survive a crash; sealed files, written by the native core
digests            SHA-256 or BLAKE3 of each chunk; ranks sign these digests
storage, stores    where a vault lies: a directory, or a store that fsspec reaches
requests           requests to a store in bounded time, and what its answers prove
keys, header       the keys that open a vault, and its list of grants
opened             a header while a process has it open, and how its keys change
objects, vault     the versions of an object as files, and the directory that holds them
ledger             records the newest versions, so that a rollback is seen
trees              seals and opens files and folders; rotates the keys

signing            the statements that a rank signs
checkpoint_form    tensors and other entries as bytes
checkpoint_check   checks that a checkpoint is valid
checkpoint_writer, checkpoint_reader  torch.distributed.checkpoint's storage
staging            seals a rank's part in a helper process
checkpoint_export  checkpoints in the formats of torch.save and safetensors
movement, resharding  change a state's layout between running workers, without a disk

gpu_batches        batches read as ciphertext, which the GPU opens
children           child processes, and how they get keys
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
