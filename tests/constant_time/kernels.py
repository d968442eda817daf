"""Compiles the kernels with nvcc, as NVRTC does on a worker, and runs them on one record."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealring.core.engine.cuda.compiler import RECORDS, kernel_text
from tests.constant_time.ptx import Machine
from tests.constant_time.ptx_state import Leak

KEY, CONTEXT = bytes(range(32)), bytes(range(100, 132))
COUNT, LANE = 5, 1
_KEY, _LOCAL, _FAILED = 0x1000, 0x2000, 0x7F000
_NOTHING: Final = (1 << 64) - 1
_RECEIVED, _SEALED, _RESULT = 0x80000, 0x100000, 0x180000
INT32_SUM: Final = ("-DSEALRING_REDUCES=1", "-DSEALRING_DTYPE=7", "-DSEALRING_KIND=1")
PLAIN: Final = ("-DSEALRING_REDUCES=0",)


def missing() -> str:
    return "" if shutil.which("nvcc") else "nvcc is not installed"


def compiled(
    folder: Path,
    defines: tuple[str, ...] = PLAIN,
    planted: tuple[str, str] | None = None,
    main: str = RECORDS,
) -> str:
    """The kernels' PTX. `planted` is a text of theirs and what stands in its place."""
    changed = 0
    for source, content in kernel_text(main).items():
        text = content.decode()
        if planted is not None:
            changed += text.count(planted[0])
            text = text.replace(*planted)
        (folder / source).write_text(text)
    assert planted is None or changed == 1
    subprocess.run(
        [
            "nvcc", "-ptx", "-arch=sm_90", "--std=c++20", "--fmad=false", "--ftz=false",
            "--prec-div=true", "-DSEALRING_RUNS_COMMANDS=0", *defines,
            str(folder / main), "-o", str(folder / "kernels.ptx"),
        ],
        check=True,
    )  # fmt: skip
    return (folder / "kernels.ptx").read_text()


@dataclass(frozen=True)
class Shape:
    """How a record is shared out, and where it lies."""

    bytes: int
    parts: int = 1
    log_turns: int = 0
    misaligned: int = 0

    @property
    def plain(self) -> bytes:  # type: ignore[valid-type]
        return bytes(i * 7 + i // 256 & 255 for i in range(self.bytes))


def header_of(shape: Shape) -> bytes:
    return struct.pack(
        "<2sBBIQIIIIQBBBBIIIQ",
        b"SR", 1, 1, shape.bytes, COUNT, LANE, 0, 0, 1, 7, 1, 3, 1, 2, 0, 0, 0, shape.bytes,
    )  # fmt: skip


class Run:
    """One kernel on one record; what is secret is marked so."""

    def __init__(self, ptx: str, shape: Shape) -> None:
        self.shape = shape
        self._machine = Machine(ptx, shape.parts)
        self._put(_KEY, KEY, secret=True)
        self._put(_FAILED, b"\xff" * 8, secret=False)

    def seal(self) -> bytes:
        self._put(_LOCAL + self.shape.misaligned, self.shape.plain, secret=True)
        self._launch("seal", local=_LOCAL + self.shape.misaligned)
        return self._get(_SEALED, self.shape.bytes + 96)

    def open(self, record: bytes) -> bytes | None:
        """Nothing about the record is public before its tag is good, so all of it is secret."""
        self._put(_RECEIVED, record, secret=True)
        self._launch("open", result=_RESULT + self.shape.misaligned)
        plain = self._get(_RESULT + self.shape.misaligned, self.shape.bytes)
        return plain if self.forged == _NOTHING else None

    @property
    def forged(self) -> int:
        """What the kernel says about a record that is not authentic."""
        return int.from_bytes(self._get(_FAILED, 8), "little")

    def hop(self, record: bytes) -> bytes:
        """Opens, reduces with the local tensor and seals."""
        self._put(_RECEIVED, record, secret=True)
        self._put(_LOCAL + self.shape.misaligned, self.shape.plain, secret=True)
        self._launch("hop", local=_LOCAL + self.shape.misaligned)
        return self._get(_SEALED, self.shape.bytes + 96)

    @property
    def leaks(self) -> set[Leak]:
        return self._machine.leaks

    def _launch(self, kernel: str, local: int = 0, result: int = 0) -> None:
        received, sealed = (
            struct.pack("<QQ", records, _KEY) + header_of(self.shape)
            for records in (_RECEIVED, _SEALED)
        )
        argument = (
            received + sealed + struct.pack("<QQQQ", local, result, self.shape.bytes, _FAILED)
        )
        argument += CONTEXT + struct.pack("<IIII", 262144, self.shape.log_turns, 1, 0)
        self._machine.launch(kernel, argument)

    def _put(self, at: int, data: bytes, *, secret: bool) -> None:
        memory = self._machine.memory
        memory.bytes[at : at + len(data)] = data
        memory.secret[at : at + len(data)] = bytes([secret]) * len(data)

    def _get(self, at: int, size: int) -> bytes:
        return bytes(self._machine.memory.bytes[at : at + size])
