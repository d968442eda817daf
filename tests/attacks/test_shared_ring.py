"""A process that can write to a link's ring can destroy records there, but not forge them."""

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

# These settings keep OpenSSL from the CPU's widest AES-GCM instructions. It then encrypts some
# kilobytes, writes them out and hashes them from there. Other code may hash from registers, and
# then this attack would prove nothing.
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
    # This shows that the attack did reach the records.
    assert outcomes.get("TamperedRecord", 0) > 0, outcomes
