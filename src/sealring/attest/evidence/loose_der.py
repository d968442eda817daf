"""Certificates whose sets are not in DER's order, as some TPM makers issue them.

DER orders the members of a SET by their bytes; a parser that insists on it cannot read the names in
these certificates. They are read from a copy with the sets in order. What the issuer signed are the
bytes as they are: signatures and fingerprints are of those.
"""

from __future__ import annotations

from typing import Final

_SET: Final = 0x31
_CONSTRUCTED: Final = 0x20
_MAX_DEPTH: Final = 16


def with_sets_in_order(der: bytes, depth: int = 0) -> bytes:
    """The same values, of the same size. ValueError: not DER in other respects either."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    return b"".join(
        _in_order(der[start:body], der[body:end], depth) for start, body, end in _members(der)
    )


def signed_part(der: bytes) -> bytes:
    """The bytes of a certificate that its issuer signed."""
    ((_, body, end),) = _members(der)
    inner = der[body:end]
    start, _, stop = _members(inner)[0]
    return inner[start:stop]


def _in_order(head: bytes, body: bytes, depth: int) -> bytes:
    if not head[0] & _CONSTRUCTED:
        return head + body
    inside = with_sets_in_order(body, depth + 1)
    if head[0] == _SET:
        inside = b"".join(sorted(inside[start:end] for start, _, end in _members(inside)))
    return head + inside


def _members(der: bytes) -> list[tuple[int, int, int]]:
    """Where each value begins, where its body does, and where it ends."""
    found, at = [], 0
    while at < len(der):
        if at + 2 > len(der) or der[at] & 0x1F == 0x1F:
            raise ValueError("not a plain tag")
        size, body = der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("a length of no known form")
            size = int.from_bytes(der[body : body + count], "big")
            body += count
        if body + size > len(der):
            raise ValueError("cut")
        found.append((at, body, body + size))
        at = body + size
    return found
