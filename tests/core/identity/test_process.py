"""What SEALRING_ALLOW_DEBUGGERS may be, and which calls shut debuggers out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sealring.core.identity.process import allows_debuggers, shut_out_debuggers
from sealring.errors import ConfigurationError

NAME = "SEALRING_ALLOW_DEBUGGERS"


def test_debuggers_are_let_in_only_by_a_one() -> None:
    assert not allows_debuggers({})
    assert not allows_debuggers({NAME: ""})
    assert not allows_debuggers({NAME: "0"})
    assert allows_debuggers({NAME: "1"})


@pytest.mark.parametrize("value", ["2", "yes", "true", " 1", "01"])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{NAME} is .*; set it to 0 or 1"):
        shut_out_debuggers({NAME: value})


READS = """
import ctypes, sys, os
from pathlib import Path
from sealring.errors import BadSecret
from sealring.core.identity.process import read_private
from sealring.core.identity.secret import read_secret

dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
assert dumpable() == 1
if sys.argv[1] == "file":
    read_private(Path(sys.argv[2]), "the key", BadSecret)
elif sys.argv[1] == "variable":
    read_secret(dict(SEALRING_SECRET="2d34b815872b8b5c963b6e4525cd9a63516cf180021473137f1e82952abe18e0"))
else:
    assert read_secret({}) is None
print(dumpable())
"""


@pytest.mark.parametrize(("where", "dumpable"), [("file", "0"), ("variable", "0"), ("none", "1")])
def test_a_process_shuts_out_debuggers_when_it_reads_a_secret(
    where: str, dumpable: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-c", READS, where, str(secret)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin"},
    )
    assert done.stdout == f"{dumpable}\n"
