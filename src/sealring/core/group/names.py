"""Which of a method's names this torch looks for.

Torch renamed five methods between 2.11 and 2.15 and kept the old names for callers. A subclass
must define one of the two: where it defines both, torch's base class calls one from the other
without end.
"""

from __future__ import annotations

from typing import Final

import torch.distributed as dist

_OLD_NAMES: Final = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}

SINGLE: Final = {
    new: new if hasattr(dist.ProcessGroup, new) else old for new, old in _OLD_NAMES.items()
}
"""By the new name: the name that this torch looks for."""
