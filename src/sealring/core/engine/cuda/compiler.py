"""From the kernels' text to code for this GPU: compiled once by NVRTC, then kept on disk.

What lies in the cache is run on the GPU with this worker's keys in reach, so it is used only if
no other user could have put it there: directory and file belong to this user, no other may write
them, and the content's digest is the one in its own first bytes. Anything else is compiled anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from sealring.core.engine.cuda import driver
from sealring.formats.files import write_whole

_HEADERS: Final = (
    "chacha20_poly1305.hpp",
    "gpu_parts.hpp",
    "gpu_record.hpp",
    "reductions.hpp",
    "plain_elements.hpp",
    "commands.hpp",
    "persistent_kernel.hpp",
    "prelaunched_kernel.hpp",
)
RECORDS: Final = "kernels.cu"
CHUNKS: Final = "open_chunks.cu"
ROWS: Final = "take_rows.cu"
_OPTIONS: Final = ("--std=c++20", "--fmad=false", "--ftz=false", "--prec-div=true")
_DIGEST_BYTES: Final = 32
_MAX_CODE_BYTES: Final = 16 << 20


def code_for(
    device: int,
    defines: tuple[tuple[str, int], ...],
    text: Mapping[str, bytes] | None = None,
) -> bytes:
    """The machine code of the text under these definitions, from the cache if it is there.

    `text` has files by name, of which the last is compiled; without it that is kernels.cu.
    """
    text = text or kernel_text()
    architecture = driver.architecture(device)
    options = [f"--gpu-architecture=sm_{architecture}", *_OPTIONS]
    options += [f"-DSEALRING_{name}={value}" for name, value in defines]
    version = driver.compiler_version()
    name = _name(options, version, text)
    directory = _cache_directory()
    if directory is not None and (code := _read(directory / name)) is not None:
        return code
    *headers, main = text
    included = {header: text[header] for header in headers}
    code = driver.compile_code(main, text[main], included, options)
    if directory is not None:
        _write(directory / name, code)
    return code


@cache
def kernel_text(main: str = RECORDS) -> Mapping[str, bytes]:
    """The headers and then the file with the kernels."""
    package = resources.files("sealring.core.engine.cuda")
    return {source: (package / source).read_bytes() for source in (*_HEADERS, main)}


def _name(options: list[str], version: tuple[int, int], text: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    parts = [repr(version).encode(), *(option.encode() for option in options)]
    for part in [*parts, *text.values()]:
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"{digest.hexdigest()}.cubin"


def _cache_directory() -> Path | None:
    """A directory that only this user can write, or None: then nothing is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "sealring" / "cuda"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and _is_ours(status) and not status.st_mode & 0o022
    return path if private else None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()


def _read(path: Path) -> bytes | None:
    """The code, or None where there is none or it cannot be believed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not (stat.S_ISREG(status.st_mode) and _is_ours(status)) or status.st_mode & 0o022:
            return None
        content = file.read(_MAX_CODE_BYTES)
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(path.name.encode() + code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Appears whole or not at all. A full disk is no reason to stop: the code is in memory."""
    digest = hashlib.sha256(path.name.encode() + code).digest()
    with contextlib.suppress(OSError):
        write_whole(path, digest + code, 0o600, lasting=False)
