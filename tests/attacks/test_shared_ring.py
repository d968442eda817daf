"""A process that can write into a link's ring while records are sealed can destroy, not forge."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Final

import pytest

from tests.attacks.ring_writer import WRONG
from tests.attacks.unprivileged import CHECKOUT

SECONDS: Final = 7

# AES-GCM as OpenSSL computes it without the CPU's widest instructions: some kilobytes are
# encrypted, written out, and then hashed from where they were written. Elsewhere the hash may be
# taken from registers, and this attack would prove nothing.
READS_BACK: Final = {
    "x86_64": {"OPENSSL_ia32cap": "~0x1000000000000000:0"},
    "aarch64": {"OPENSSL_armcap": "1"},
}


@pytest.mark.threat("R6")
def test_a_byte_changed_in_the_ring_while_it_is_sealed_is_never_delivered() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.ring_writer", str(SECONDS)],
        cwd=CHECKOUT,
        env=os.environ | READS_BACK.get(platform.machine(), {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {
        name: int(n) for n, name in (line.split(" ", 1) for line in done.stdout.splitlines())
    }
    assert WRONG not in outcomes, outcomes
    # The attack did reach the records.
    assert outcomes.get("TamperedRecord", 0) > 0, outcomes
