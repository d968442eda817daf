"""The protocol's constants, apart from those that only tune it.

A change above the line below is a change of the protocol and of docs/spec.md; a change beneath it
is a matter of speed, and every rank must make it alike only where the comment says so.
"""

from __future__ import annotations

from typing import Final

from sealring import _native

PROTOCOL_VERSION: Final = 3
"""Of set-up: hellos, sessions, contexts."""
SESSION_FRAME: Final = 31
"""First byte of what set-up sends under a session; a content type that TLS has not assigned."""
RECORD_VERSION: Final = 1
STORED_VERSION: Final = 1
"""Of a part of a value in a sealed store."""
SUITE: Final = "AES-256-GCM"
KEY_EXCHANGE: Final = "X25519MLKEM768"

KEY_BYTES: Final = _native.KEY_BYTES
TAG_BYTES: Final = _native.TAG_BYTES
HEADER_BYTES: Final = _native.HEADER_BYTES
MAX_PAYLOAD_BYTES: Final = _native.MAX_PAYLOAD_BYTES
GPU_PAYLOAD_BYTES: Final = _native.GPU_PAYLOAD_BYTES
"""Plaintext per record of what a GPU seals, at most."""
WIRE_PAYLOAD_BYTES: Final = 2 << 20
"""Plaintext in one slot of a wire between GPUs: a run of such records."""
WIRE_SLOTS: Final = 32
"""Of every rank's area."""
EXCHANGE_PAYLOAD_BYTES: Final = 16 << 20
"""Plaintext in a run of records that GPUs exchange, at most."""
EXCHANGE_BYTES: Final = 64 << 20
"""Of sealed records that a rank's GPU sends, or receives, in one exchange, at most."""
MAX_WORLD: Final = 65536
MOST_LINKED_AT_ONCE: Final = 8
"""In a group of up to so many, all pairs are linked when it forms: later would cost more."""
REKEY_BYTES: Final = 64 << 30
"""A key seals at most this much before it is ratcheted forward."""

MAX_NONCE_SECONDS: Final = 3600
"""The most that a policy may set `nonce_seconds` to: a broker remembers used nonces for longer."""

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
"""Up to so many, a call that is like an earlier one is run from what that one prepared."""
RING_BYTES: Final = 768 << 10
"""Shared memory per direction of a link."""
RING_CONTROL_BYTES: Final = 4096
"""The control page behind each side's ring."""
CERTIFICATE_HOURS: Final = 24.0
"""How long a certificate lives unless its issuer says otherwise."""
