"""The device types that sealring serves. `import torch` loads this module, so it imports
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ServedDevices(Sequence[str]):
    """The device types that sealring serves and that this process has.

    torch chooses a device from this list when it makes a group. The list is computed only then:
    asking for GPUs while torch is imported would load the driver in processes that use no GPU.
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
