"""Makes the name "sealring" known to torch.distributed. Loaded by `import torch`: kept tiny."""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch.distributed as dist

    if dist.is_available() and "SEALRING" not in dist.Backend._plugins:
        dist.Backend.register_backend("sealring", _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, _backend_options: Any = None) -> Any:
    from sealring.group.create import create_group

    return create_group(options)
