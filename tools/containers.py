"""Builds the container images of deploy/containers: the broker's and a worker's.

    python -m tools.containers [--base IMAGE | --local-base SUITE] [--python 3.13] [ROLE...]

Packages are installed from wheels: sealring's from dist/ (`make wheels`), the others from pip's
index with the hashes of requirements.lock. Nothing is compiled. A broker's image has no torch.
`--local-base` makes the base image on this machine from Debian's packages, for use without a
registry; it needs root and mmdebstrap. The images are localhost/sealring-broker and
localhost/sealring-worker.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from platform import machine
from typing import Final
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from tools.lock import pinned, pip_settings

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / "build" / "containers"
EXTRAS: Final = {
    "broker": ("broker", "tdx", "nvidia"),
    "worker": ("broker", "tdx", "nvidia", "metrics"),
}
WITHOUT: Final = {"broker": {"torch"}, "worker": set[str]()}
"""Packages that a role's image leaves out, with everything that only they need."""
NEWEST_GLIBC: Final = 41
"""The glibc 2.x of Debian 13; wheels with newer manylinux tags are not used."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(role: str, python: str) -> list[str]:
    """All packages that sealring needs for a role on that Python, by the installed metadata."""
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    found: set[str] = set()
    todo: list[tuple[str, tuple[str, ...]]] = [("sealring", EXTRAS[role])]
    while todo:
        name, extras = todo.pop()
        for text in distribution(name).requires or ():
            wanted = Requirement(text)
            here = wanted.marker is None or any(
                wanted.marker.evaluate({**target, "extra": extra}) for extra in ("", *extras)
            )
            needed = plain(wanted.name)
            if here and needed not in found and needed not in WITHOUT[role]:
                found.add(needed)
                todo.append((needed, tuple(wanted.extras)))
    return sorted(found)


def gather(role: str, python: str, into: Path) -> None:
    """Collects the wheels of a role: sealring's own, and the others by the lock's hashes."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    tag = "cp" + python.replace(".", "")
    own = [
        wheel
        for wheel in (ROOT / "dist").glob("sealring-*.whl")
        if (f"-{tag}-{tag}-" in wheel.name or "-cp312-abi3-" in wheel.name)
        and wheel.name.endswith(f"_{machine()}.whl")
        and not (tag == "cp311" and "abi3" in wheel.name)
    ]
    if len(own) != 1:
        raise SystemExit(f"dist/ has no wheel for Python {python} on {machine()}: make wheels")
    shutil.copy(own[0], into)
    wanted = packages(role, python)
    lock = (ROOT / "requirements.lock").read_text()
    entries = [one for one in re.split(r"\n(?=\S)", lock) if one.partition("==")[0] in wanted]
    names = {one.partition("==")[0] for one in entries}
    if missing := set(wanted) - names:
        raise SystemExit(f"requirements.lock does not name {', '.join(sorted(missing))}: make lock")
    if "torch" in wanted:
        entries = [one for one in entries if not one.startswith("torch==")]
        shutil.copy(cpu_torch(tag, lock), into)
    listed = into.parent / "requirements.txt"
    listed.write_text("\n".join(entries) + "\n")
    platforms = [f"manylinux_2_{minor}_{machine()}" for minor in range(NEWEST_GLIBC, 16, -1)]
    platforms.append(f"manylinux2014_{machine()}")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--require-hashes", "--implementation", "cp",
            "--python-version", python, "--abi", tag, "--abi", "abi3", "--abi", "none",
            *(word for one in platforms for word in ("--platform", one)),
            "--dest", str(into), "--requirement", str(listed),
        ],
        check=True,
    )  # fmt: skip


def cpu_torch(tag: str, lock: str) -> Path:
    """Finds torch's build without CUDA in pip's find-links folders. The lock must have its hash.

    The build of the index would need gigabytes of CUDA libraries.
    """
    version = next(version for name, version in pinned() if name == "torch")
    for place in pip_settings("find-links"):
        folder = Path(unquote(urlsplit(place).path))
        for wheel in folder.glob(f"torch-{version}+cpu-{tag}-*_{machine()}.whl"):
            if hashlib.sha256(wheel.read_bytes()).hexdigest() in lock:
                return wheel
    raise SystemExit(
        f"a worker's image needs torch {version}+cpu for {tag} on {machine()}: put a build whose "
        "hash is in requirements.lock into a folder of pip's find-links (PIP_FIND_LINKS)"
    )


def make_base(suite: str) -> str:
    """Makes an image like Debian's slim one, from the mirror that this machine's apt uses."""
    name = f"localhost/sealring-base:{suite}"
    if subprocess.run(["podman", "image", "exists", name]).returncode == 0:
        return name
    uris = subprocess.check_output(["apt-get", "indextargets", "--format", "$(SITE) $(REPO_URI)"])
    mirror = next(
        line.split()[1] for line in uris.decode().splitlines() if line.endswith("/debian/")
    )
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    tarball = WORK / f"{suite}.tar"
    tarball.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", suite, str(tarball),
            f"deb [signed-by={keys}] {mirror} {suite} main",
        ],
        check=True,
    )  # fmt: skip
    subprocess.run(["podman", "import", "--quiet", str(tarball), name], check=True)
    tarball.unlink()
    return name


def build(role: str, base: str | None, python: str) -> None:
    context = WORK / role
    gather(role, python, context / "wheels")
    # Only Docker's format has health checks. The build needs no cgroup or network of its own, so it
    # works on machines that cannot start containers.
    subprocess.run(
        [
            "buildah", "build", "--quiet", "--format", "docker", "--isolation", "chroot",
            *(["--build-arg", f"BASE={base}", "--pull-never"] if base else []),
            "--file", str(ROOT / "deploy" / "containers" / f"{role}.Containerfile"),
            "--tag", f"localhost/sealring-{role}", str(context),
        ],
        check=True,
    )  # fmt: skip
    size = ["podman", "image", "inspect", "--format", "{{.Size}}", f"localhost/sealring-{role}"]
    megabytes = int(subprocess.check_output(size, text=True)) / 1e6
    print(f"localhost/sealring-{role}: {megabytes:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", help="the base image; the Containerfile's own if not given")
    parser.add_argument(
        "--local-base", metavar="SUITE", help="make the base from Debian's packages"
    )
    parser.add_argument("--python", default="3.13", help="the base's version of Python")
    parser.add_argument("roles", nargs="*", default=sorted(EXTRAS), metavar="ROLE")
    given = parser.parse_args()
    for tool in ("buildah", "podman", *(["mmdebstrap"] if given.local_base else [])):
        if shutil.which(tool) is None:
            raise SystemExit(f"building images needs {tool}: make container-deps")
    base = make_base(given.local_base) if given.local_base else given.base
    for role in given.roles:
        build(role, base, given.python)


if __name__ == "__main__":
    main()
