"""A GPU's tensors parked in host memory as ciphertext: optimizer state, activations.

The GPU seals them before they leave its memory and opens them when they come back. Host memory
holds no plaintext of them, and a change of it is found before anything is computed with it.
"""

from sealring.train.offload.optimizer import OffloadedOptimizer
from sealring.train.offload.parking import Parked, Parking, offload_saved_tensors

__all__ = ["OffloadedOptimizer", "Parked", "Parking", "offload_saved_tensors"]
