"""What no schedule and no protocol can undercut: the cryptography itself, on this machine.

a collective       the bytes that the busiest core seals and opens, at AES's rate
forming a group    the signatures that a rank makes and verifies
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native, limits


def aes_rate(record_bytes: int = limits.RECORD_BYTES, runs: int = 400) -> float:
    """Bytes a second of AES-256-GCM on one core, sealing and opening, from memory at hand.

    The best of many runs: the floor is what the core can do, whatever else runs on it.
    """
    cipher = _native.Cipher(os.urandom(limits.KEY_BYTES))
    plain = np.zeros(record_bytes, np.uint8)
    sealed = np.zeros(record_bytes + limits.TAG_BYTES, np.uint8)
    addresses = plain.ctypes.data, sealed.ctypes.data
    seal = open_ = float("inf")
    for _ in range(runs):
        seal = min(seal, _took(lambda: cipher.seal(addresses[0], record_bytes, addresses[1])))
        open_ = min(open_, _took(lambda: cipher.open(addresses[1], record_bytes, addresses[0])))
    return 2 * record_bytes / (seal + open_)


def _took(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def busiest_core(rank_bytes: Sequence[int], cores: int) -> int:
    """What the busiest core seals and opens at least, given what each rank does.

    A rank's work is on one core; ranks that outnumber the cores share them, at best evenly.
    """
    return max(max(rank_bytes), -(-sum(rank_bytes) // min(len(rank_bytes), cores)))


@cache
def signature_seconds(runs: int = 200) -> tuple[float, float]:
    """To make an Ed25519 signature and to verify one, on one core; the best of many runs."""
    key, message = Ed25519PrivateKey.generate(), bytes(128)
    signature, public = key.sign(message), key.public_key()
    return (
        min(_took(lambda: key.sign(message)) for _ in range(runs)),
        min(_took(lambda: public.verify(signature, message)) for _ in range(runs)),
    )


def forming_floor(groups: Sequence[int], strangers: int, handshakes: float) -> float:
    """A rank's signatures, in seconds: for groups of these sizes and for its share of handshakes.

    It signs each group's transcript and verifies each other member's signature over it, verifies
    the certificates of `strangers`, and at its end of a TLS handshake makes one signature and
    verifies two.
    """
    sign, verify = signature_seconds()
    made = len(groups) + handshakes
    verified = sum(size - 1 for size in groups) + strangers + 2 * handshakes
    return made * sign + verified * verify
