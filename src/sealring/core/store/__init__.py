"""A torch.distributed Store whose names and values only the job's workers can read or write.

sealring.core.store.open_sealed_store(store)    under the job's secret, before there is a group
sealring.core.store.seal_group_store()          the default group's, under a key agreed in the group
init_process_group("sealring", init_method="sealring://")      the first of them, by torch
torchrun --rdzv-backend sealring                               the agents' own store
"""

from sealring.core.store.keys import open_sealed_store, seal_group_store, sealed_group_store
from sealring.core.store.sealed import SealedStore

__all__ = ["SealedStore", "open_sealed_store", "seal_group_store", "sealed_group_store"]
