"""What training frameworks need of sealring beyond its process groups.

figures        the counts of this process as one flat dictionary
callbacks      the same at every log of HF's Trainer and of Lightning, imported when called
torchft        a sealed Manager for torchft, which has to be installed
replica_ranks  the ranks of workers in a job of torchft's
"""

from sealring.train.integrations.callbacks import lightning_callback, log_with_trainer
from sealring.train.integrations.figures import Figures

__all__ = ["Figures", "lightning_callback", "log_with_trainer"]
