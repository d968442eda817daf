"""Runs the README's commands, in its order, in a new and empty virtual environment.

    python tools/readme_commands.py [--wheel WHEEL] [--list]

It reads the commands from README.md. It leaves out `make test`, and commands with a file that is
not in the checkout, such as train.py. pip's settings (PIP_CONSTRAINT, PIP_INDEX_URL) choose torch's
build; without them it is the newest that the package allows. `--wheel` installs a wheel of the
checkout instead of `pip install .`, so that nothing is compiled. `make` uses the checkout's own
.venv, as always. Prints each command with the seconds it took, and stops at the first that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LEFT_OUT: Final = ("make test",)


def commands(readme: str) -> list[str]:
    """The lines of all shell blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def placeholders(command: str) -> list[str]:
    """The scripts in a command that the checkout does not have."""
    scripts = [word for word in shlex.split(command) if word.endswith(".py")]
    return [script for script in scripts if not (ROOT / script).exists()]


def runnable(readme: str) -> list[str]:
    return [
        command
        for command in commands(readme)
        if command not in LEFT_OUT and not placeholders(command)
    ]


def run(command: str, environ: dict[str, str]) -> int:
    print(f"$ {command}", flush=True)
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    print("\n".join(done.stdout.splitlines()[-12:]))
    print(f"  exit status {done.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="in the place of `pip install .`")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    given = parser.parse_args()
    wanted = runnable((ROOT / "README.md").read_text())
    if given.wheel is not None:
        wanted = [
            f"pip install {shlex.quote(str(given.wheel))}" if each == "pip install ." else each
            for each in wanted
        ]
    if given.list:
        print("\n".join(wanted))
        return 0
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        clean = {name: value for name, value in os.environ.items() if "SEALRING" not in name}
        clean.pop("PYTHONPATH", None)
        environ = {
            **clean, "VIRTUAL_ENV": folder, "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1", "PIP_QUIET": "1",
        }  # fmt: skip
        for command in wanted:
            if run(command, environ) != 0:
                return 1
        python = "python -c 'import torch; print(\"torch\", torch.__version__)'; "
        return run(python + f"du -sh {folder} | cut -f1", environ)


if __name__ == "__main__":
    sys.exit(main())
