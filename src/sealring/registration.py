"""Makes the name "sealring" known to torch.distributed. Loaded by `import torch`: kept tiny."""

from __future__ import annotations

import os
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


def register() -> None:
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if dist.is_available() and "SEALRING" not in dist.Backend._plugins:
        dist.Backend.register_backend("sealring", _create_group, extended_api=True, devices=["cpu"])
        devices: Any = ServedDevices()
        dist.Backend.backend_capability["sealring"] = devices
        if os.environ.get("_SEALRING_LAUNCHED"):
            from sealring.last_words import tell_the_launcher

            tell_the_launcher()
        # init_method="sealring://" is env:// with a store that is sealed under the job's secret.
        register_rendezvous_handler("sealring", _rendezvous)  # type: ignore[no-untyped-call]


def _create_group(options: Any, _backend_options: Any = None) -> Any:
    from sealring.group.create import create_group
    from sealring.group.options import options_of_torch

    return create_group(options_of_torch(options))


def _rendezvous(url: str, **options: Any) -> Any:
    from sealring.store.rendezvous import rendezvous

    return rendezvous(url, **options)
