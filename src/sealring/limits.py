"""The protocol's constants, followed by constants that only tune speed.

To change one above the line below changes the protocol and docs/spec.md. One below the line affects
only speed; it must be equal on all ranks only if its comment says so.
"""

from __future__ import annotations

from typing import Final

from sealring import _native

PROTOCOL_VERSION: Final = 3
"""The version of set-up: hellos, sessions, contexts."""
SESSION_FRAME: Final = 31
"""The first byte of a set-up message under a session. TLS has not assigned this content type."""
RECORD_VERSION: Final = 1
STORED_VERSION: Final = 1
"""The version of a part of a value in a sealed store."""
SUITE: Final = "AES-256-GCM"
KEY_EXCHANGE: Final = "X25519MLKEM768"

KEY_BYTES: Final = _native.KEY_BYTES
TAG_BYTES: Final = _native.TAG_BYTES
HEADER_BYTES: Final = _native.HEADER_BYTES
MAX_PAYLOAD_BYTES: Final = _native.MAX_PAYLOAD_BYTES
GPU_PAYLOAD_BYTES: Final = _native.GPU_PAYLOAD_BYTES
"""The most plaintext in a record that a GPU seals."""
WIRE_PAYLOAD_BYTES: Final = 2 << 20
"""The plaintext in one slot of a wire between GPUs, which holds several such records."""
WIRE_SLOTS: Final = 32
"""The number of slots in every rank's area."""
EXCHANGE_PAYLOAD_BYTES: Final = 16 << 20
"""The most plaintext in consecutive records that GPUs exchange."""
EXCHANGE_BYTES: Final = 64 << 20
"""The most bytes of sealed records that a rank's GPU sends, or receives, in one exchange."""
MAX_WORLD: Final = 65536
MOST_LINKED_AT_ONCE: Final = 8
"""In a group of at most this many ranks, all pairs are linked when it forms, which is cheaper than
linking them later."""
REKEY_BYTES: Final = 64 << 30
"""A key seals at most this much before it is ratcheted forward."""

MAX_NONCE_SECONDS: Final = 3600
"""The maximum of a policy's `nonce_seconds`. A broker remembers used nonces for longer."""

MAX_SETUP_BYTES: Final = 16 << 10
"""The largest set-up message a peer may send over TLS."""

# ---- tuning -------------------------------------------------------------------------------------

RECORD_BYTES: Final = 124 << 10
"""Plaintext per record. All ranks of a group must agree; the handshake checks it.

A little less than a power of two: with header and tags a record then fills two of the loopback's
64 KiB TCP segments and does not spill a few bytes into a third (`sealring bench allreduce
--transport tcp` with the setting record_bytes at 131072 shows what that costs).
"""
PREPARED_BYTES: Final = 256 << 10
"""The largest tensor of a prepared call (core/group/prepared.py)."""
RING_BYTES: Final = 768 << 10
"""Shared memory per direction of a link."""
RING_CONTROL_BYTES: Final = 4096
"""The control page after each side's ring."""
CERTIFICATE_HOURS: Final = 24.0
"""How long a certificate is valid by default."""
