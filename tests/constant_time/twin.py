"""Builds the CPU's compilation of the GPU's cipher and runs it under valgrind."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
HEADER: Final = Path("/usr/include/valgrind/memcheck.h")
COMPILERS: Final = ("g++", "clang++")
_FOUND: Final = 99
# -O3 as the module is built (CMakeLists.txt), and -O1, where compilers choose other code.
LEVELS: Final = ("-O3", "-O1")


@dataclass(frozen=True)
class Outcome:
    leaks: bool
    output: str


def missing() -> str:
    """What this check needs and the machine does not have; empty if nothing."""
    if shutil.which("valgrind") is None or not HEADER.exists():
        return "valgrind is not installed (make system-deps)"
    return "" if compilers() else "no C++ compiler"


def compilers() -> list[str]:
    return [name for name in COMPILERS if shutil.which(name)]


def run_twin(folder: Path, compiler: str, level: str, planted: str = "") -> Outcome:
    """Whether a branch or an address depended on a secret; `planted` adds such a one."""
    program = folder / "twin"
    native = [
        ROOT / "native" / name
        for name in ("stand_ins/gpu_arithmetic.cpp", "keys/secret_memory.cpp")
    ]
    sources = [ROOT / "tests/constant_time/twin.cpp", *native]
    subprocess.run(
        [
            compiler, "-std=c++20", level, "-ffp-contract=off", "-gdwarf-4",
            "-DSEALRING_CHECK_CONSTANT_TIME", *([f"-D{planted}"] if planted else []),
            f"-I{ROOT / 'native'}", f"-I{ROOT / 'src/sealring/core/engine/cuda'}",
            *map(str, sources), "-lcrypto", "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    ran = subprocess.run(
        ["valgrind", "--quiet", f"--error-exitcode={_FOUND}", str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if ran.returncode not in (0, _FOUND):
        raise RuntimeError(f"the check did not run: {ran.stdout}{ran.stderr}")
    return Outcome(ran.returncode == _FOUND, ran.stdout + ran.stderr)
