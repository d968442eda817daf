"""Fields of a TOML text, each held to what it may be. Mistakes are named with line and field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, Final

from sealring.errors import BadPolicy
from sealring.limits import MAX_WORLD

_BITS: Final = 64


class Reader:
    def __init__(self, text: str) -> None:
        self.missing: list[str] = []
        """Rules that a table must state, or name under `unchecked`, and does neither."""
        self._lines = text.splitlines()
        try:
            self.document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as problem:
            raise BadPolicy(f"the policy is not TOML: {problem}") from None

    def table(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """Empty where it is missing."""
        table = self.document.get(name, {})
        if not isinstance(table, dict):
            raise self.bad("", name, f"is a table: [{name}]")
        self.known(table, known, name)
        return table

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Of [[name]]; empty where there is none."""
        found = self.document.get(name, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self.bad("", name, f"is a list of tables: [[{name}]]")
        return found

    def ranks(self, entry: dict[str, Any], where: str) -> tuple[int, int]:
        """The first and the last."""
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(entry.get("ranks")), re.ASCII)
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if not first <= last < MAX_WORLD:
            raise self.bad(where, "ranks", 'is "3" or "0-7"')
        return first, last

    def kinds(self, entry: dict[str, Any], where: str, known: Collection[str]) -> frozenset[str]:
        named = entry.get("kinds")
        if not isinstance(named, list) or not named or not all(one in known for one in named):
            raise self.bad(where, "kinds", "is a list of kinds that this policy describes")
        return frozenset(named)

    def digests(self, table: dict[str, Any], where: str, name: str, *sizes: int) -> frozenset[str]:
        """Each of one of the sizes, in bytes; without any, of at most 64."""
        found = table.get(name, [])
        counts = [str(size) for size in sizes] or ["1,64"]
        pattern = re.compile("|".join(rf"(?:[0-9a-f]{{2}}){{{count}}}" for count in counts))
        if not isinstance(found, list) or not all(
            isinstance(one, str) and pattern.fullmatch(one) for one in found
        ):
            listed = " or ".join(map(str, sizes))
            size_text = f"{listed} bytes each" if sizes else "at most 64 bytes each"
            raise self.bad(where, name, f"is a list of lower-case hexadecimal, {size_text}")
        return frozenset(found)

    def digest_lists(
        self, table: dict[str, Any], where: str, name: str, sizes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, frozenset[str]]:
        """A table of lists: {4 = ["..."], 7 = ["...", "..."]}, each of digests."""
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of lists")
        inner = f"{where}.{name}"
        self.known(found, sizes, inner)
        lists = {key: self.digests(found, inner, key, *sizes[key]) for key in found}
        for key, values in lists.items():
            self.some(values, inner, key)
        return lists

    def words(
        self,
        table: dict[str, Any],
        where: str,
        name: str,
        known: Collection[str] | None,
        default: Collection[str] = (),
        longest: int = 63,
    ) -> frozenset[str]:
        found = table.get(name, list(default))
        if not isinstance(found, list) or not all(
            isinstance(one, str) and (one in known if known else 0 < len(one) <= longest)
            for one in found
        ):
            listed = ", ".join(sorted(known)) if known else "words"
            raise self.bad(where, name, f"is a list of {listed}")
        return frozenset(found)

    def number(
        self, table: dict[str, Any], where: str, name: str, least: int, most: int, default: int
    ) -> int:
        value = table.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(where, name, f"is a number from {least} to {most}")
        return value

    def numbers(
        self, table: dict[str, Any], where: str, name: str, known: Collection[str], most: int
    ) -> dict[str, int]:
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of numbers")
        inner = f"{where}.{name}"
        self.known(found, known, inner)
        return {key: self.number(found, inner, key, 0, most, 0) for key in found}

    def flags(
        self, table: dict[str, Any], where: str, name: str, known: Collection[str], others: str
    ) -> tuple[dict[str, int], int]:
        """Bits of a number by name, {smt = false}, as 0 and 1; and `others`, a list of positions,
        as a mask."""
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of true and false")
        inner = f"{where}.{name}"
        self.known(found, {*known, others}, inner)
        positions = found.get(others, [])
        if not isinstance(positions, list) or not all(
            type(one) is int and 0 <= one < _BITS for one in positions
        ):
            raise self.bad(inner, others, f"is a list of positions of bits, 0 to {_BITS - 1}")
        named = {key: int(self.flag(found, inner, key, False)) for key in found if key != others}
        return named, sum(1 << one for one in set(positions))

    def flag(self, table: dict[str, Any], where: str, name: str, default: bool) -> bool:
        value = table.get(name, default)
        if type(value) is not bool:
            raise self.bad(where, name, "is true or false")
        return value

    def some(self, values: Collection[str], where: str, name: str) -> None:
        if not values:
            raise self.bad(where, name, "is empty or missing: it would admit nothing")

    def known(self, table: dict[str, Any], known: Collection[str], where: str) -> None:
        for name in table:
            if name not in known:
                listed = ", ".join(sorted(known))
                raise self.bad(where, name, f"is not known here; known: {listed}")

    def bad(self, where: str, name: str, must: str) -> BadPolicy:
        field = f"{where}.{name}" if where else name
        return BadPolicy(f"the policy, line {self.line(where, name)}: {field} {must}")

    def line(self, where: str, name: str) -> int:
        """Where the field stands; where its table starts if it does not; else line 1."""
        table, at = "", 0
        for number, line in enumerate(self._lines, 1):
            if match := re.match(r"\s*\[+\s*([\w.\s-]+?)\s*\]+", line):
                table = match[1].replace(" ", "")
                if table in (where, field := f"{where}.{name}".lstrip(".")):
                    at = at or number
                    if table == field:
                        return number
            elif match := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line):
                # `minimum_tcb = {snp = 8}` holds its fields in one line.
                path = f"{table}.{match[1]}".lstrip(".")
                inline = f"{where}.".startswith(f"{path}.") and name in line
                if (table == where and match[1] == name) or inline:
                    return number
        return at or 1
