"""A newcomer's first contact: the install, its error messages, and the names that it brings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sealring import _native

ROOT = Path(__file__).parent.parent


def test_the_backend_is_there_without_an_import_of_ours() -> None:
    code = "import torch.distributed as d; assert 'sealring' in d.Backend.backend_list"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd="/")


def test_registering_twice_changes_nothing() -> None:
    import torch.distributed as dist

    from sealring.core.registration import register

    register()
    register()
    assert dist.Backend.backend_list.count("sealring") == 1


def test_both_entry_point_groups_lead_to_the_registration() -> None:
    for group in ("torch.backends", "torch.distributed.backends"):
        (entry,) = [e for e in entry_points(group=group) if e.name == "sealring"]
        assert entry.value == "sealring.core.registration:register"


def test_torch_is_pinned_exactly_in_the_locked_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.+]+", line) for line in requirements)


def test_everything_the_tests_ran_with_is_locked() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {_plain(line.split("==")[0]) for line in lines if "==" in line}
    # These are installed by hand or by the environment, and are not tested.
    besides = {"pip", "setuptools", "sealring", "atheris"}
    installed = {_plain(distribution.name) for distribution in distributions()}
    assert installed - besides <= locked


def test_the_locked_versions_satisfy_each_other() -> None:
    """Otherwise pip could install nothing with these versions as constraints."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {_plain(name): pin for name, _, pin in (line.partition("==") for line in lines) if pin}
    needs = [
        (distribution.name, Requirement(text))
        for distribution in distributions()
        for text in distribution.requires or ()
    ]
    unmet = [
        f"{who} needs {need}, and {locked[_plain(need.name)]} is locked"
        for who, need in needs
        if (need.marker is None or need.marker.evaluate({"extra": ""}))
        and _plain(need.name) in locked
        and not need.specifier.contains(locked[_plain(need.name)], prereleases=True)
    ]
    assert unmet == []


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        (
            ["-DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=TRUE"],
            {},
            "sealring needs OpenSSL 3's headers: install them "
            "(Debian, Ubuntu: apt-get install libssl-dev;",
        ),
        (
            ["-DSEALRING_STATIC_OPENSSL=/no/such/openssl"],
            {},
            "SEALRING_STATIC_OPENSSL: there is no lib/libcrypto.a in /no/such/openssl.",
        ),
        (
            [],
            {"CXX": "/no/such/compiler"},
            "sealring needs a C++20 compiler: install one (Debian, Ubuntu: apt-get install g++;",
        ),
    ],
    ids=["no OpenSSL headers", "no static libcrypto", "no compiler"],
)
def test_a_missing_build_tool_is_named_in_one_sentence(
    options: list[str], environment: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    cmake = Path(sys.executable).parent / "cmake"
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-DSEALRING_NATIVE_TESTS=ON", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert sentence in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.parametrize(("state", "installed"), [("wheel", False), ("editable", True)])
def test_no_wheel_contains_the_stand_ins(state: str, installed: bool, tmp_path: Path) -> None:
    """The stand-in for a GPU is installed only with an editable checkout."""
    tools = Path(sys.executable).parent
    found = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True)
    subprocess.run(
        [
            tools / "cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={found.strip()}", f"-DSKBUILD_STATE={state}",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    files = (tmp_path / "cmake_install.cmake").read_text()
    assert "_native.cpython" in files
    assert ("_stand_ins.cpython" in files) is installed


def test_a_libcrypto_that_is_built_in_stays_inside() -> None:
    if not _native.OPENSSL_BUILT_IN:
        pytest.skip("the system's OpenSSL is linked here")
    # This process has no other OpenSSL, so a symbol that is found would be the module's own.
    code = (
        "import ctypes, sys; module = ctypes.CDLL(sys.argv[1]); module.PyInit__native; "
        "assert 'libcrypto' not in open('/proc/self/maps').read(); module.EVP_aes_256_gcm"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, _native.__file__], capture_output=True, text=True
    )
    assert done.stderr.strip().endswith("undefined symbol: EVP_aes_256_gcm")


def test_an_install_goes_on_where_no_other_libcrypto_is_available(tmp_path: Path) -> None:
    nowhere = tmp_path / "apt.conf"
    nowhere.write_text('Dir::Etc { SourceList "/dev/null"; SourceParts "/dev/null"; };')
    done = subprocess.run(
        [ROOT / "native" / "libcrypto.sh", tmp_path],
        env={**os.environ, "APT_CONFIG": str(nowhere)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert re.fullmatch(
        r"libcrypto: the system's OpenSSL(, which does not use this CPU's VAES: .+)?\n", done.stdout
    )
    assert (tmp_path / "prefix").read_text() == "\n"
