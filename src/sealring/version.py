"""The version of this package. It has a file of its own so that every layer can name it.

It comes from git's tags when the package is built or installed; see CONTRIBUTING.md, Releases.
"""

from importlib.metadata import version
from typing import Final

__version__: Final = version("sealring")
