"""Merkle trees as RFC 6962 hashes them: roots and proofs, made from subtrees and checked alone.

A perfect subtree is (height, index): it covers the leaves from index << height on, 1 << height of
them. Every hash that a proof needs is one, or is folded from a few of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sealring.errors import ForkedLog, NotIncluded

EMPTY_ROOT: Final = hashlib.sha256(b"").digest()
MAX_PROOF: Final = 63
"""Hashes in a proof: sizes have 63 bits."""

ReadSubtree = Callable[[int, int], bytes]
"""The hash of a perfect subtree, by its height and index."""


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def perfect_hash(hashes: Sequence[bytes]) -> bytes:
    """The root over a power of two of neighbouring subtrees of one height."""
    while len(hashes) > 1:
        hashes = [node_hash(hashes[index], hashes[index + 1]) for index in range(0, len(hashes), 2)]
    return hashes[0]


def folded(hashes: Sequence[bytes]) -> bytes:
    """The root over perfect subtrees that shrink from left to right."""
    if not hashes:
        return EMPTY_ROOT
    root = hashes[-1]
    for left in reversed(hashes[:-1]):
        root = node_hash(left, root)
    return root


def grown(size: int, subtrees: Sequence[bytes], leaf: bytes) -> list[bytes]:
    """The perfect subtrees of a tree after one more leaf, from those of its first `size` leaves."""
    found = [*subtrees, leaf]
    while size & 1:
        right = found.pop()
        found[-1] = node_hash(found[-1], right)
        size >>= 1
    return found


def peaks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The perfect subtrees that cover the leaves [start, end), from left to right.

    `start` is a multiple of the largest of them, as it is in every split that RFC 6962 makes.
    """
    count = end - start
    for height in reversed(range(count.bit_length())):
        if count >> height & 1:
            yield height, start >> height
            start += 1 << height


def tree_root(size: int, read: ReadSubtree) -> bytes:
    return _range_hash(0, size, read)


def inclusion_proof(index: int, size: int, read: ReadSubtree) -> list[bytes]:
    """RFC 6962, 2.1.1: from the leaf's sibling up to the root's child."""
    if not 0 <= index < size:
        raise NotIncluded(f"there is no entry {index} in a log of {size}")
    start, end = 0, size
    siblings = []
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            siblings.append((middle, end))
            end = middle
        else:
            siblings.append((start, middle))
            start = middle
    return [_range_hash(*sibling, read) for sibling in reversed(siblings)]


def consistency_proof(old: int, size: int, read: ReadSubtree) -> list[bytes]:
    """RFC 6962, 2.1.2: that the first `old` entries of a log of `size` are what they were."""
    if not 0 <= old <= size:
        raise ForkedLog(f"a log of {size} entries cannot follow from one of {old}")
    if old == 0:
        return []
    start, end = 0, size
    ranges = []
    while old != end:
        middle = start + _split(end - start)
        if old <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    if start != 0:
        ranges.append((start, end))
    return [_range_hash(*each, read) for each in reversed(ranges)]


def check_inclusion(
    index: int, size: int, leaf: bytes, proof: Sequence[bytes], root: bytes
) -> None:
    """RFC 9162, 2.1.3.2. NotIncluded unless the proof leads from the leaf to the root."""
    failed = NotIncluded(f"the proof does not show this entry as number {index} of {size}")
    if not 0 <= index < size or len(proof) > MAX_PROOF:
        raise failed
    node, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise failed
        if node & 1 or node == last:
            found = node_hash(sibling, found)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        node, last = node >> 1, last >> 1
    if last or found != root:
        raise failed


def check_consistency(
    old: int, old_root: bytes, size: int, new_root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162, 2.1.4.2. ForkedLog unless the new tree begins with the whole old one."""
    failed = ForkedLog(f"the log of {size} entries does not continue the one of {old}")
    if old > size or len(proof) > MAX_PROOF:
        raise failed
    if old in (0, size):
        known = new_root if old == size else EMPTY_ROOT
        if proof or old_root != known or (size == 0 and new_root != EMPTY_ROOT):
            raise failed
        return
    if not proof:
        raise failed
    hashes = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    node, last = old - 1, size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    before = after = hashes[0]
    for each in hashes[1:]:
        if last == 0:
            raise failed
        if node & 1 or node == last:
            before, after = node_hash(each, before), node_hash(each, after)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            after = node_hash(after, each)
        node, last = node >> 1, last >> 1
    if last or before != old_root or after != new_root:
        raise failed


def _range_hash(start: int, end: int, read: ReadSubtree) -> bytes:
    return folded([read(height, index) for height, index in peaks(start, end)])


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1
