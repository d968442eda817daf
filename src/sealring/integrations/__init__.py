"""What sealring counts, for the loggers and callbacks of training frameworks.

figures    the counts of this process as one flat dictionary
callbacks  the same at every log of HF's Trainer and of Lightning; imports them when it is called
"""

from sealring.integrations.callbacks import lightning_callback, log_with_trainer
from sealring.integrations.figures import Figures

__all__ = ["Figures", "lightning_callback", "log_with_trainer"]
