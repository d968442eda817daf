"""Parks a GPU's tensors in host memory as ciphertext: optimizer state, activations.

The GPU seals tensors before they leave its memory and opens them when they come back. Host memory
never holds their plaintext. If host memory is changed, this is detected before the data is used.
"""

from sealring.train.offload.optimizer import OffloadedOptimizer
from sealring.train.offload.parking import Parked, Parking, offload_saved_tensors

__all__ = ["OffloadedOptimizer", "Parked", "Parking", "offload_saved_tensors"]
