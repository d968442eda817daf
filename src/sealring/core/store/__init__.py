"""A torch.distributed Store whose names and values only the job's workers can read or write.

sealring.sealed_store(store)      under the job's secret, before there is a group
sealring.sealed_store()           the default group's, under a key agreed in the group
init_process_group("sealring", init_method="sealring://")      the first of them, by torch
torchrun --rdzv-backend sealring                               the agents' own store
"""

from sealring.core.store.sealed import SealedStore, sealed_store

__all__ = ["SealedStore", "sealed_store"]
