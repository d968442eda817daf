"""A wheel that must not be published is refused, and the error names the reason."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tools import wheels

from sealring import _native

ROOT = Path(__file__).parents[2]
GOOD = "int PyInit__native(void) { return 0; } const char *version(void) { return TEXT; }"
HIDDEN = "-fvisibility=hidden"
PINNED = f"OpenSSL {wheels.pinned_openssl()} 1 Jan 2026"
NAME = "sealring-0.1.0-cp312-abi3-linux_aarch64.whl"


def module(folder: Path, source: str, *options: str, text: str = PINNED) -> bytes:
    """Builds a shared object that contains the text and exports only its entry point."""
    visible = source.replace("int PyInit", '__attribute__((visibility("default"))) int PyInit')
    (folder / "module.c").write_text(visible)
    made = folder / "module.so"
    command = ["cc", "-shared", "-fPIC", f'-DTEXT="{text}"', "-o", str(made)]
    subprocess.run([*command, str(folder / "module.c"), *options], check=True)
    return made.read_bytes()


def wheel(folder: Path, files: dict[str, bytes], name: str = NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
    return path


def test_one_with_all_inside_passes(tmp_path: Path) -> None:
    content = {"sealring/_native.abi3.so": module(tmp_path, GOOD, HIDDEN)}
    wheels.check(wheel(tmp_path, content))


def test_the_build_that_links_the_systems_openssl_does_not(tmp_path: Path) -> None:
    source = GOOD + " const void *EVP_aes_256_gcm(void); const void *use(void) "
    source += "{ return EVP_aes_256_gcm(); }"
    content = {"sealring/_native.abi3.so": module(tmp_path, source, HIDDEN, "-lcrypto")}
    with pytest.raises(wheels.WheelRefused, match=r"it needs libcrypto\.so\.\d, which is not on"):
        wheels.check(wheel(tmp_path, content))


def test_one_that_shows_its_libcrypto_to_others_does_not(tmp_path: Path) -> None:
    source = GOOD + " int EVP_aes_256_gcm(void) { return 0; }"
    content = {"sealring/_native.abi3.so": module(tmp_path, source)}
    with pytest.raises(wheels.WheelRefused, match="exports more than its entry point"):
        wheels.check(wheel(tmp_path, content))


def test_another_openssl_than_the_pinned_does_not(tmp_path: Path) -> None:
    other = module(tmp_path, GOOD, HIDDEN, text="OpenSSL 3.0.2 15 Mar 2022")
    with pytest.raises(wheels.WheelRefused, match=r"of native/openssl\.pin is not inside"):
        wheels.check(wheel(tmp_path, {"sealring/_native.abi3.so": other}))


def test_the_module_that_is_installed_exports_its_entry_point_alone() -> None:
    _, exported = wheels.linkage(Path(_native.__file__).read_bytes())
    assert exported == ["PyInit__native"]


@pytest.mark.parametrize(
    ("inside", "name", "reason"),
    [
        (
            ["sealring/_native.abi3.so", "sealring.libs/libcrypto.so.3"],
            NAME,
            "only shared object",
        ),
        (["sealring/_native.abi3.so", "sealring/_stand_ins.abi3.so"], NAME, "only shared object"),
        (["sealring/_native.abi3.so", "sealring/_stand_ins.pyi"], NAME, "contains sealring/_stand"),
        (["sealring/_native.cpython-312.so"], NAME, "its tag does not fit"),
        (["sealring/_native.abi3.so"], NAME.replace("abi3", "cp312"), "its tag does not fit"),
        ([], NAME, "only shared object"),
    ],
)
def test_what_must_not_be_in_it(inside: list[str], name: str, reason: str, tmp_path: Path) -> None:
    files = dict.fromkeys(inside, module(tmp_path, GOOD, HIDDEN))
    with pytest.raises(wheels.WheelRefused, match=reason):
        wheels.check(wheel(tmp_path, files, name))


def test_the_oldest_python_with_the_stable_abi_builds_for_all_later_ones(tmp_path: Path) -> None:
    def pretend(version: str) -> str:
        path = tmp_path / f"python{version}"
        major, minor = version.split(".")
        path.write_text(f"#!/bin/sh\necho {major} {minor} /usr/bin/python{version}\n")
        path.chmod(0o755)
        return str(path)

    given = [pretend(version) for version in ("3.14", "3.12", "3.11", "3.13")]
    chosen = [version for version, _ in wheels.interpreters(given)]
    assert chosen == [(3, 11), (3, 12)]


def test_a_pin_whose_file_is_another_builds_nothing(tmp_path: Path) -> None:
    """Only the archive's SHA-256 counts, wherever the archive came from."""
    native = tmp_path / "native"
    native.mkdir()
    script = native / "libcrypto.sh"
    script.write_bytes((ROOT / "native" / "libcrypto.sh").read_bytes())
    script.chmod(0o755)
    (native / "openssl.pin").write_text(f"version=3.5.7\nsha256={'0' * 64}\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    # Any server could give such an answer.
    (tools / "curl").write_text(
        '#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\necho not OpenSSL >"$2"\n'
    )
    (tools / "curl").chmod(0o755)
    done = subprocess.run(
        [script, tmp_path / "out", "pinned"], capture_output=True, text=True,
        env={"PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "is not the pinned file" in done.stderr
    assert "no source of OpenSSL 3.5.7 has the SHA-256 of native/openssl.pin" in done.stderr
    assert not (tmp_path / "out" / "lib").exists()
    assert not (tmp_path / "out" / "prefix").exists()


def test_the_source_distribution_has_what_a_build_needs_and_no_build(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], check=True)
    left_by_builds = ["src/sealring/_native.so", "src/sealring/__pycache__/a.pyc", "build/lib.a"]
    for name in left_by_builds:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    code = "import sys; from scikit_build_core.build import build_sdist as b; b(sys.argv[1])"
    command = [sys.executable, "-c", code, str(out)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (made,) = out.glob("sealring-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["native", "src", "CMakeLists.txt", "LICENSE", "README.md"]
    tracked = subprocess.check_output(["git", "ls-files", *needed], cwd=tree, text=True)
    assert set(tracked.split()) <= names
    assert not names & set(left_by_builds)
