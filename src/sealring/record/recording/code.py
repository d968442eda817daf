"""The code that a worker runs, as far as the process itself can tell."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from sealring.record.provenance.digests import Named
from sealring.record.provenance.intervals import Code
from sealring.record.provenance.runs import RunFolder
from sealring.version import __version__


def running_code(run: RunFolder, container: str | None) -> Code:
    """Keeps the script and the list of packages beside the run's statements."""
    path = _script()
    content = b"" if path is None else path.read_bytes()
    run.write_evidence(content)
    name = "(interactive)" if path is None else path.name
    return Code(
        script=Named(name, hashlib.sha256(content).hexdigest()),
        packages=run.write_evidence(package_list()),
        sealring=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        container=container or os.environ.get("SEALRING_CONTAINER") or None,
    )


def package_list() -> bytes:
    """NAME==VERSION of every installed package, in order, a line each."""
    found = {
        f"{one.metadata['Name'].lower()}=={one.version}"
        for one in metadata.distributions()
        if one.metadata["Name"]
    }
    return "".join(f"{line}\n" for line in sorted(found)).encode()


def _script() -> Path | None:
    """The file that was started; None in an interactive interpreter."""
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else None)
    path = None if not name else Path(name)
    return path if path is not None and path.is_file() else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
