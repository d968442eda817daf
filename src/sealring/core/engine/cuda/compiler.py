"""Compiles the kernels for this GPU: once by NVRTC, then from a cache on disk.

Cached code runs on the GPU within reach of this worker's keys. It is used only if no other user
can have written it: this user owns the directory and the file, no other user may write them, and
the file begins with the digest of its content. Otherwise the kernels are compiled again.
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
    """Returns the machine code of `text` compiled with these definitions, if possible from the
    cache.

    `text` maps file names to contents. The last file is compiled; the others are its headers. The
    default is kernels.cu.
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
    """All headers, and last the file `main` with the kernels."""
    package = resources.files("sealring.core.engine.cuda")
    return {source: (package / source).read_bytes() for source in (*_HEADERS, main)}


def _name(options: list[str], version: tuple[int, int], text: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    parts = [repr(version).encode(), *(option.encode() for option in options)]
    for part in [*parts, *text.values()]:
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"{digest.hexdigest()}.cubin"


def _cache_directory() -> Path | None:
    """A directory that only this user can write; None if there is none, and nothing is cached."""
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
    """The cached code; None if there is none or it cannot be trusted."""
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
    """Caches the code atomically. Errors such as a full disk are ignored: the code is in memory."""
    digest = hashlib.sha256(path.name.encode() + code).digest()
    with contextlib.suppress(OSError):
        write_whole(path, digest + code, 0o600, lasting=False)
