"""Installs sealring's wheel on a machine without compilers and headers, and runs it.

    python tools/install_test.py [--python PYTHON] [--steps N] FOLDER      FOLDER: of `make wheels`

It hides compilers, linkers, build tools and header files in a separate mount namespace; the machine
itself is not changed. There pip installs the wheel with all extras into a new virtual environment,
only from wheels. Then `sealring doctor` and `sealring demo` must succeed. Prints each command with
the seconds it took. Needs root, or a kernel that lets users make namespaces; without, the exit
status is 77.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_NAMESPACE = 77
TOOL = re.compile(
    r"(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+|cpp|c89|c99|clang|clang\+\+|clang-cpp|tcc|ld|"
    r"ld\.(?:bfd|gold|lld)|lld|as|ar|make|gmake|cmake|ninja|rustc|cargo|nvcc|ccache)(?:-[\d.]+)?"
)
"""Matches the names of tools that could compile or link."""
HEADERS = ("/usr/include", "/usr/local/include", "/usr/lib/gcc")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--steps", type=int, help="training steps of the demo; its default if not given"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.inside:
        return inside(given.python, given.folder.resolve(), given.steps)
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        print("install test: this machine allows no mount namespace", file=sys.stderr)
        return NO_NAMESPACE
    return subprocess.run(
        [*namespace, sys.executable, __file__, "--inside", *sys.argv[1:]]
    ).returncode


def inside(python: str, folder: Path, steps: int | None) -> int:
    code = "import sys, sysconfig; print(sys.executable); print(sysconfig.get_path('include'))"
    path, headers = subprocess.check_output([python, "-c", code], text=True).split("\n")[:2]
    hide_compilers(headers)
    with tempfile.TemporaryDirectory() as work:
        home = Path(work)
        run = Commands(home)
        run("python -m venv venv", [path, "-m", "venv", str(home / "venv")])
        run(
            "pip install 'sealring[all]'",
            [
                "pip", "install", "--quiet", "--disable-pip-version-check",
                "--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt"),
                "--find-links", str(folder),
                f"sealring[all]=={version_in(folder)}",
            ],
        )  # fmt: skip
        checks = json.loads(run("sealring doctor", ["sealring", "doctor", "--json"]))["checks"]
        (library,) = [one["found"] for one in checks if one["check"] == "OpenSSL, records"]
        print(f"    records: {library}")
        if "built into sealring" not in library:
            print("install test: the wheel's module uses an OpenSSL from outside", file=sys.stderr)
            return 1
        short = ["--steps", str(steps)] if steps else []
        told = json.loads(
            run(" ".join(["sealring demo", *short]), ["sealring", "demo", "--json", *short])
        )
        print(
            f"    as promised: {told['as_promised']}, {told['ranks']} ranks, {told['steps']} steps"
        )
        return 0 if told["as_promised"] else 1


def version_in(folder: Path) -> str:
    versions = {wheel.name.split("-")[1] for wheel in folder.glob("sealring-*.whl")}
    if len(versions) != 1:
        raise SystemExit(
            f"install test: {folder} must hold one version of sealring, not {versions}"
        )
    return versions.pop()


# --- a machine without compilers


def hide_compilers(python_headers: str) -> None:
    """Mounts /dev/null over each tool and an empty folder over each folder of headers; checks
    it."""
    tools = sorted(set(compilers()))
    folders = [one for one in (*HEADERS, python_headers) if Path(one).is_dir()]
    lines = [f"mount --bind /dev/null '{one}'" for one in tools]
    lines += [f"mount -t tmpfs -o ro none '{one}'" for one in folders]
    subprocess.run(["sh", "-ec", "\n".join(lines)], check=True)
    left = [str(one) for one in compilers()]
    left += [str(one) for folder in folders for one in Path(folder).iterdir()]
    if left:
        raise SystemExit(f"install test: still there: {left[:5]}")
    print(f"{len(tools)} build tools and {len(folders)} folders of headers are hidden", flush=True)


def compilers() -> Iterator[Path]:
    folders = {*os.environ["PATH"].split(":"), *os.defpath.split(":"), "/usr/bin", "/usr/local/bin"}
    for folder in sorted(folders):
        if folder and Path(folder).is_dir():
            for one in Path(folder).iterdir():
                if TOOL.fullmatch(one.name) and os.access(one, os.X_OK) and one.is_file():
                    yield one.resolve()


class Commands:
    """Runs commands in the new virtual environment, with only pip's and proxy variables kept."""

    def __init__(self, home: Path) -> None:
        passed = ("PIP_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
        kept = {
            name: value for name, value in os.environ.items() if name.upper().startswith(passed)
        }
        path = f"{home}/venv/bin:/usr/bin:/bin"
        self._environment = {**kept, "PATH": path, "HOME": str(home), "TMPDIR": str(home)}
        self._home = home

    def __call__(self, shown: str, command: list[str]) -> str:
        start = time.monotonic()
        program = shutil.which(command[0], path=self._environment["PATH"]) or command[0]
        done = subprocess.run(
            [program, *command[1:]], env=self._environment, cwd=self._home, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        print(f"$ {shown:<34} {time.monotonic() - start:6.1f} s", flush=True)
        if done.returncode:
            raise SystemExit(
                f"install test: it ended with status {done.returncode}:\n{done.stdout}"
            )
        return done.stdout


if __name__ == "__main__":
    sys.exit(main())
