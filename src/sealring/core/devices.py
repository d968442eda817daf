"""The device types that sealring serves. Loaded by `import torch`: it imports nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ServedDevices(Sequence[str]):
    """The device types that this process can have tensors on, of those that sealring serves.

    torch chooses a device from this list when it makes a group. It is not computed before that:
    asking for GPUs while torch is imported would load the driver in processes that use none.
    """

    def __getitem__(self, index: Any) -> Any:
        return self._present()[index]

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return repr(self._present())

    @staticmethod
    def _present() -> list[str]:
        import torch

        return ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]
