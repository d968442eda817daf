"""Makes the files of a release in dist/, and checks everything before they are published.

    python tools/release.py VERSION          on the tag vVERSION
    python tools/release.py --dry VERSION    as if HEAD had that tag; only build/ and dist/ change

It publishes nothing. A dry run continues if the changelog has no date yet, or if the pinned OpenSSL
is known to lack a fix, and says so at its end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VERSION: Final = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


class NotReady(Exception):
    """The version cannot be released; the text says why."""


@dataclass
class Release:
    version: str
    dry: bool
    root: Path = ROOT
    pythons: tuple[str, ...] = ()
    postponed: list[str] = field(default_factory=list)
    """Problems that a dry run found, which must be fixed before the release."""

    @property
    def tree(self) -> Path:
        return self.root / "build" / "release"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    def git(self, *arguments: str, cwd: Path | None = None) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=cwd or self.root, capture_output=True, text=True)
        if done.returncode:
            raise NotReady(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def must(self, sound: bool, why: str) -> None:
        """Requires a condition: a release fails without it, a dry run only notes `why`."""
        if sound:
            return
        if not self.dry:
            raise NotReady(why)
        self.postponed.append(why)

    # --- checks without building

    def check_tree(self) -> None:
        if not VERSION.fullmatch(self.version):
            raise NotReady(f"{self.version} is not a version: X.Y.Z, or X.Y.ZrcN")
        if changed := self.git("status", "--porcelain"):
            raise NotReady(f"the tree is not clean: {changed.splitlines()[0].strip()}")

    def check_tag(self) -> None:
        tag, how = f"v{self.version}", f"git tag --sign v{self.version}"
        here = tag in self.git("tag", "--points-at", "HEAD").splitlines()
        self.must(here, f"HEAD has no tag {tag}: {how}")
        if here and self.git("cat-file", "-t", tag) != "tag":
            raise NotReady(f"{tag} is a lightweight tag and cannot be signed: {how}")

    def check_changelog(self) -> None:
        text = (self.root / "CHANGELOG.md").read_text()
        heading = re.search(rf"^## \[{re.escape(self.version)}\] - (\S+)$", text, re.MULTILINE)
        if heading is None:
            raise NotReady(f"CHANGELOG.md has no heading '## [{self.version}] - DATE'")
        dated = re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[1]) is not None
        self.must(dated, f"CHANGELOG.md: the date of {self.version} is {heading[1]!r}")

    def check_openssl(self) -> None:
        from sealring.cli.openssl import Library, what_is_wrong

        pin = (self.root / "native" / "openssl.pin").read_text()
        (version,) = re.findall(r"^version=(\d+\.\d+\.\d+)$", pin, re.MULTILINE)
        major, minor, patch = map(int, version.split("."))
        number = major << 28 | minor << 20 | patch << 4
        wrong = what_is_wrong(Library("records", version, number, maintained_by=""))
        self.must(wrong is None, f"native/openssl.pin is {version}: {wrong}")

    # --- building

    def build(self) -> None:
        """Builds twice, from clones of the tagged commit. The results must be equal byte by
        byte."""
        shutil.rmtree(self.tree, ignore_errors=True)
        self.git("clone", "--quiet", str(self.root), str(self.tree))
        if self.dry:
            name = ["-c", "user.name=release", "-c", "user.email=release@localhost"]
            tag = f"v{self.version}"
            self.git(*name, "tag", "--force", "--message", tag, tag, cwd=self.tree)
        script = str(self.tree / "tools" / "reproducible.sh")
        environment = {
            **os.environ, "KEEP": str(self.dist), "CACHE": str(self.root / "build" / "wheels"),
        }  # fmt: skip
        subprocess.run([script, sys.executable, *self.pythons], check=True, env=environment)

    def check_version(self) -> None:
        found = {file.name.split("-")[1] for file in self.dist.glob("*.whl")}
        found |= {file.name[9 : -len(".tar.gz")] for file in self.dist.glob("sealring-*.tar.gz")}
        if found != {self.version}:
            raise NotReady(f"the files are of {sorted(found)}, and the tag says {self.version}")

    def write_bill(self) -> None:
        """Writes the bill of materials of the built wheel, not of the installed checkout."""
        (wheel,) = self.dist.glob("sealring-*-cp311-*.whl")
        unpacked = self.tree / "wheel"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        # Without `site` (-S), which would put the checkout before the wheel.
        packages = next(one for one in sys.path if one.endswith("site-packages"))
        code = (
            f"import runpy, sys; sys.path[:0] = [{str(unpacked)!r}, {packages!r}]; "
            f"runpy.run_path({str(self.root / 'tools' / 'sbom.py')!r}, run_name='__main__')"
        )
        bill = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True
        ).stdout
        for needed in (f'pkg:pypi/sealring@{self.version}"', '"value": "static"'):
            if needed.encode() not in bill:
                raise NotReady(f"the bill of materials does not say {needed}")
        (self.dist / "sealring.cdx.json").write_bytes(bill)

    def write_sums(self) -> None:
        files = sorted(self.dist.glob("sealring[-.]*"))
        lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}" for one in files]
        (self.dist / "SHA256SUMS").write_text("\n".join(lines) + "\n")

    def install(self) -> None:
        script = str(self.root / "tools" / "install_test.py")
        done = subprocess.run([sys.executable, script, "--steps", "20", str(self.dist)])
        if done.returncode:
            raise NotReady(f"the install test ended with status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="try it without a tag")
    parser.add_argument("--python", action="append", default=[], help="what to build with")
    parser.add_argument("version")
    given = parser.parse_args()
    release = Release(given.version, given.dry, pythons=tuple(given.python))
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("the tree is clean", release.check_tree),
        ("HEAD has the tag", release.check_tag),
        ("the changelog has the version", release.check_changelog),
        ("the pinned OpenSSL has all known fixes", release.check_openssl),
        ("source distribution and wheels, twice and alike", release.build),
        ("their version is the tag's", release.check_version),
        ("bill of materials", release.write_bill),
        ("SHA-256 of all files", release.write_sums),
        ("install without a compiler", release.install),
    )
    for name, step in steps:
        before = len(release.postponed)
        try:
            step()
        except (NotReady, subprocess.CalledProcessError) as problem:
            raise SystemExit(f"NOT READY  {name}: {problem}") from None
        print(f"{'LATER ' if len(release.postponed) > before else 'ok    '} {name}", flush=True)
    print((release.dist / "SHA256SUMS").read_text(), end="")
    for one in release.postponed:
        print(f"before the release: {one}")


if __name__ == "__main__":
    main()
