"""A torch.distributed Store whose names and values only the job's workers can read or write.

sealring.sealed_store(store)      seals a store under the job secret, before there is a group
sealring.sealed_store()           seals the default group's store, under a key agreed in the group
init_process_group("sealring", init_method="sealring://")      makes torch use the first kind
torchrun --rdzv-backend sealring                               seals the store of torchrun's agents
"""

from sealring.core.store.sealed import SealedStore, sealed_store

__all__ = ["SealedStore", "sealed_store"]
