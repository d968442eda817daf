"""Writes requirements.lock: every package of constraints.txt with the SHA-256 of its files.

    python tools/lock.py            ask the package index that pip is configured with, and write it
    python tools/lock.py here       print what to install on this machine

The lock has wheels for Linux on x86-64 and 64-bit Arm, and source archives. torch is a special
case: the build (CPU, CUDA) depends on the machine, and an operator often provides one in a local
folder (pip's `find-links`). Files there come from the operator, so `here` uses them, and says if
the lock does not have their hash. Files from the network must have a hash of the lock. The build of
the index is for CUDA: its libraries are locked, too, but left out with a local CPU build.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
HEAD = """\
# Made by `make lock` from constraints.txt; not edited by hand.
# pip install --require-hashes --no-deps -r requirements.lock
"""
_WHEEL = re.compile(
    r"-(py2\.py3|py3|cp3\d+)-(none|abi3|cp31[1-4])-(any|.*manylinux.*_(x86_64|aarch64))\.whl$"
)

# Packages that only torch's CUDA build needs.
_CUDA = re.compile(r"cuda-|nvidia-|triton==")


def pinned() -> list[tuple[str, str]]:
    lines = CONSTRAINTS.read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(plain(name), version) for name, version in pairs]


def plain(name: str) -> str:
    """A project's name as the index normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Links(HTMLParser):
    """Parses a project's page of a simple index: file names and their SHA-256."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        url = urlsplit(dict(attrs).get("href") or "")
        if tag == "a" and url.fragment.startswith("sha256="):
            self.files[unquote(url.path).rpartition("/")[2]] = url.fragment.removeprefix("sha256=")


def hashes(index: str, name: str, version: str) -> list[str]:
    with urllib.request.urlopen(f"{index}/{name}/", timeout=60) as answer:  # noqa: S310
        page = Links()
        page.feed(answer.read().decode())
    found = {
        digest
        for file, digest in page.files.items()
        if version_of(file) == version and wanted(file)
    }
    if not found:
        raise SystemExit(f"the index has no file of {name} {version}")
    return sorted(found)


def version_of(file: str) -> str:
    if file.endswith(".whl"):
        return file.split("-")[1]
    return re.sub(r"\.(tar\.gz|zip)$", "", file).rpartition("-")[2]


def wanted(file: str) -> bool:
    return _WHEEL.search(file) is not None or file.endswith(".tar.gz")


def pip_settings(key: str) -> list[str]:
    """All values of one of pip's settings, from files and environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    # With PIP_QUIET set, pip would not print the list.
    loud = {**os.environ, "PIP_QUIET": "0"}
    listed = subprocess.run(command, check=True, capture_output=True, text=True, env=loud).stdout
    values = [
        line.partition("=")[2].strip("'") for line in listed.splitlines() if f".{key}=" in line
    ]
    return [one for value in values for one in value.split()]


def requirement(name: str, version: str, digests: list[str]) -> str:
    return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in digests)])


def write_lock() -> None:
    from pip._internal.models.index import PyPI  # the index that pip asks by default

    index = (pip_settings("index-url") or [PyPI.simple_url])[0].rstrip("/")
    packages = pinned()
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(lambda one: hashes(index, *one), packages))
    # Keep builds of torch that were locked on other machines.
    torch = [name for name, _ in packages].index("torch")
    version = packages[torch][1]
    local = local_builds(version).values()
    digests[torch] = sorted({*digests[torch], *locked_torch(version), *local})
    lines = [requirement(*one, found) for one, found in zip(packages, digests, strict=True)]
    LOCK.write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{LOCK.name}: {len(packages)} packages, {sum(map(len, digests))} files")


def local_builds(version: str) -> dict[str, str]:
    """The builds of torch for this machine in local folders: labelled version and SHA-256."""
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import parse_wheel_filename

    here = set(sys_tags())
    found = {}
    for place in dict.fromkeys(pip_settings("find-links")):
        folder = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        for wheel in sorted(folder.glob(f"torch-{version}[+-]*.whl")):
            _, labelled, _, tags = parse_wheel_filename(wheel.name)
            if tags & here:
                found[str(labelled)] = hashlib.sha256(wheel.read_bytes()).hexdigest()
                print(f"torch: {wheel.name} is in {folder}", file=sys.stderr)
    return found


def locked_torch(version: str) -> list[str]:
    entry = re.search(rf"^torch=={re.escape(version)} \\\n(.*?[^\\])$", read_lock(), re.M | re.S)
    return re.findall("sha256:([0-9a-f]{64})", entry[0]) if entry else []


def read_lock() -> str:
    return LOCK.read_text() if LOCK.exists() else ""


def print_requirements() -> None:
    """Prints the lock; if a local folder has a build of torch, with only that build."""
    (version,) = (version for name, version in pinned() if name == "torch")
    lock, locked = read_lock(), locked_torch(version)
    for labelled, digest in local_builds(version).items():
        if digest not in locked:
            print(f"torch: it is not in the lock: sha256 {digest}", file=sys.stderr)
        # With the full version, because pip prefers a file of the index, whose hash it knows.
        entry = requirement("torch", version, locked)
        assert entry in lock
        lock = lock.replace(entry, requirement("torch", labelled, [digest]))
        if labelled.endswith("+cpu"):
            entries = re.split(r"\n(?=\S)", lock)
            lock = "\n".join(one for one in entries if not _CUDA.match(one)) + "\n"
        break
    print(lock.rstrip())


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        print_requirements()
    else:
        write_lock()
