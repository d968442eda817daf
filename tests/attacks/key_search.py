"""Finds another process's keys in its memory, by search patterns that only this process builds.

The worker reports its keys masked, so that the report itself leaves no copy of them in its memory.
What OpenSSL derives from a key counts as the key: AES's round keys and the key of GHASH.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from sealring import _native

MASK: Final = 0xA5
RATCHETS: Final = 40
"""The number of later keys to search for: more than a worker of these tests makes."""
PIECE: Final = 8 << 20
_OVERLAP: Final = 256


def masked(secret: object) -> str:
    """Returns the secret masked, in hexadecimal, so that its bytes are never adjacent in memory."""
    return "".join(f"{byte ^ MASK:02x}" for byte in memoryview(secret))  # type: ignore[arg-type]


def unmasked(text: str) -> bytes:
    return bytes(byte ^ MASK for byte in bytes.fromhex(text))


def patterns(keys: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns every pattern that must not be found: each key, its successors and derived keys."""
    found: dict[str, bytes] = {}
    for name, key in keys.items():
        if len(key) != 32:
            found[name] = key
            continue
        generation = key
        for number in range(RATCHETS):
            found |= _forms(f"{name}, generation {number}", generation)
            generation = _native.ratchet(generation)
        found |= _forms(f"{name}, for GPUs", _native.gpu_key(key))
    return found


def _forms(name: str, key: bytes) -> dict[str, bytes]:
    hash_key = Cipher(AES(key), ECB()).encryptor().update(bytes(16))
    rounds = round_keys(key)[32:96]
    return {
        name: key,
        f"{name}, in hexadecimal": key.hex().encode(),
        f"{name}, its round keys": rounds,
        f"{name}, its round keys as words": b"".join(
            rounds[at : at + 4][::-1] for at in range(0, len(rounds), 4)
        ),
        f"{name}, its hash key": hash_key,
        f"{name}, its hash key reversed": hash_key[::-1],
    }


def round_keys(key: bytes) -> bytes:
    """Expands a 256-bit key by FIPS 197, section 5.2, with the S-box computed below."""
    words = [key[at : at + 4] for at in range(0, 32, 4)]
    constant = 1
    for at in range(8, 60):
        word = words[-1]
        if at % 8 == 0:
            word = bytes(_SBOX[byte] for byte in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = constant << 1
        elif at % 8 == 4:
            word = bytes(_SBOX[byte] for byte in word)
        words.append(bytes(a ^ b for a, b in zip(word, words[at - 8], strict=True)))
    return b"".join(words)


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _substitute(byte: int) -> int:
    inverse = next((x for x in range(256) if _times(byte, x) == 1), 0)
    rotations = (inverse << turn | inverse >> 8 - turn for turn in range(5))
    out = 0x63
    for each in rotations:
        out ^= each & 0xFF
    return out


_SBOX: Final = bytes(_substitute(byte) for byte in range(256))


def found_in(file: Path, wanted: Mapping[str, bytes]) -> list[str]:
    """Returns the names of the patterns that occur anywhere in the file."""
    return found_among(_pieces(file), wanted)


def _pieces(file: Path) -> Iterator[bytes]:
    """Reads only the parts of the file that were written; most of a core file is holes."""
    piece = bytearray()
    with file.open("rb") as opened:
        end, size = 0, file.stat().st_size
        while end < size:
            try:
                start = os.lseek(opened.fileno(), end, os.SEEK_DATA)
            except OSError:  # the rest of the file is a hole
                break
            end = os.lseek(opened.fileno(), start, os.SEEK_HOLE)
            while start < end:
                piece += os.pread(opened.fileno(), min(PIECE, end - start), start)
                start += PIECE
                if len(piece) >= PIECE:
                    yield bytes(piece)
                    del piece[:-_OVERLAP]  # a key may lie across the end
    yield bytes(piece)


def found_among(pieces: Iterable[bytes], wanted: Mapping[str, bytes]) -> list[str]:
    """Returns the names of the patterns that occur in any of these pieces of memory."""
    firsts = {name: int.from_bytes(pattern[:4], "little") for name, pattern in wanted.items()}
    words = np.array(sorted(set(firsts.values())), dtype=np.uint32)
    # The upper half of a word already rules out most of the memory, without a search.
    table = np.zeros(1 << 16, dtype=bool)
    table[words >> 16] = True
    found = set()
    for piece in pieces:
        for shift in range(4):
            count = (len(piece) - shift) // 4
            if count <= 0:
                continue
            memory = np.frombuffer(piece, dtype="<u4", offset=shift, count=count)
            likely = memory[table[memory >> 16]]
            there = set(np.unique(likely[np.isin(likely, words)]).tolist())
            for name, pattern in wanted.items():
                if firsts[name] in there and pattern in piece:
                    found.add(name)
            del memory, likely
    return sorted(found)
