"""The version of this package. It has a file of its own so that every layer can name it."""

from typing import Final

__version__: Final = "0.1.0"
