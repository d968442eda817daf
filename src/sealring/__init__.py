"""sealring: a torch.distributed backend in which every byte between workers is sealed.

    torch.distributed.init_process_group("sealring")

`import torch` finds the backend by itself; this package is imported for its errors and tools.
Nothing here imports torch: torch imports us.
"""

from sealring.errors import (
    ConfigurationError,
    GroupError,
    HandshakeError,
    SealringError,
)

__version__ = "0.1.0"

__all__ = ["ConfigurationError", "GroupError", "HandshakeError", "SealringError", "__version__"]
