"""Values of the setting allow_debuggers, and the calls after which debuggers are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sealring.core.identity.process import shut_out_debuggers
from sealring.core.settings import ALLOW_DEBUGGERS, with_settings
from sealring.errors import ConfigurationError


def test_debuggers_are_let_in_only_when_it_is_said() -> None:
    assert not ALLOW_DEBUGGERS.read({})
    assert not ALLOW_DEBUGGERS.read({"SEALRING_SETTINGS": ""})
    assert not ALLOW_DEBUGGERS.read(with_settings({}, allow_debuggers=False))
    assert ALLOW_DEBUGGERS.read(with_settings({}, allow_debuggers=True))


@pytest.mark.parametrize("value", ["1", 1, "true", None, [True]])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"allow_debuggers.* is .*; set it to true or"):
        shut_out_debuggers(with_settings({}, allow_debuggers=value))


READS = """
import ctypes, sys, os
from pathlib import Path
from sealring.errors import BadCredential
from sealring.core.identity.process import read_private
from sealring.core.identity.secret import read_secret

dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
assert dumpable() == 1
if sys.argv[1] == "file":
    read_private(Path(sys.argv[2]), "the key", BadCredential)
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
