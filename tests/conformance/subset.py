"""The cases that CI runs at every change: each operation and each kind of group once."""

from __future__ import annotations

SUBSET: frozenset[str] = frozenset()
