"""The policy as TOML. A mistake is named with its line and field; what is not known is refused."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from sealring.errors import BadPolicy
from sealring.identity.attestation.policy import KindRules, Policy, RankRules, ResourceRules
from sealring.identity.names import is_job, is_resource
from sealring.limits import MAX_WORLD

_TOP: Final = {
    "version", "job", "freshness", "rejoins", "ranks", "certificate", "peers", "resources",
    "snp", "simulated",
}  # fmt: skip
_FRESHNESS: Final = {"nonce_seconds", "require_revocation_lists", "revocation_list_days"}
_SNP: Final = {"measurements", "signers", "products", "minimum_tcb", "vmpl", "migration"}
_SIMULATED: Final = {"measurements", "minimum_tcb", "roots"}
_PRODUCTS: Final = {"Milan", "Genoa", "Turin"}
_TCB: Final = {
    "snp": {"fmc", "bootloader", "tee", "snp", "microcode"},
    "simulated": {"simulated"},
}


def parse_policy(text: str) -> Policy:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise BadPolicy(f"the policy is not TOML: {problem}") from None
    return _Reader(text).policy(document)


class _Reader:
    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def policy(self, document: dict[str, Any]) -> Policy:
        self._known(document, _TOP, "")
        if document.get("version") != 1 or type(document["version"]) is not int:
            raise self._bad("", "version", "is 1")
        kinds: dict[str, KindRules] = {}
        if "snp" in document:
            kinds["snp"] = self._snp(self._table(document, "snp", _SNP))
        roots: frozenset[str] = frozenset()
        if "simulated" in document:
            table = self._table(document, "simulated", _SIMULATED)
            kinds["simulated"] = KindRules(
                measurements=self._digests(table, "simulated", "measurements", None),
                minimum_tcb=self._tcb(table, "simulated"),
            )
            roots = self._digests(table, "simulated", "roots", 32)
            self._some(kinds["simulated"].measurements, "simulated", "measurements")
            self._some(roots, "simulated", "roots")
        if not kinds:
            raise self._bad("", "snp", "or [simulated] is missing: the policy admits nothing")
        fresh = self._table(document, "freshness", _FRESHNESS)
        return Policy(
            kinds=kinds,
            ranks=self._ranks(document.get("ranks", []), set(kinds)),
            simulated_roots=roots,
            nonce_seconds=self._number(fresh, "freshness", "nonce_seconds", 1, 3600, 120),
            require_revocation_lists=self._flag(
                fresh, "freshness", "require_revocation_lists", True
            ),
            revocation_list_days=self._number(
                fresh, "freshness", "revocation_list_days", 1, 3650, 30
            ),
            rejoins=self._number(document, "", "rejoins", 0, 1000, 0),
            job=self._job(document),
            certificate_minutes=self._number(
                self._table(document, "certificate", {"minutes"}),
                "certificate",
                "minutes",
                1,
                1440,
                10,
            ),
            peer_evidence=self._flag(
                self._table(document, "peers", {"evidence"}), "peers", "evidence", False
            ),
            resources=self._resources(document.get("resources", []), set(kinds)),
        )

    def _job(self, document: dict[str, Any]) -> str | None:
        job = document.get("job")
        if job is not None and not (isinstance(job, str) and is_job(job)):
            raise self._bad("", "job", "has 1 to 63 of A-Z a-z 0-9 . _ -")
        return job

    def _resources(self, entries: Any, kinds: set[str]) -> tuple[ResourceRules, ...]:
        """A resource goes to all admitted workers unless its entry says to whom."""
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise self._bad("", "resources", "is a list of tables: [[resources]]")
        rules = []
        for entry in entries:
            self._known(entry, {"path", "ranks", "kinds"}, "resources")
            path = entry.get("path")
            if not isinstance(path, str) or not is_resource(path) or path.startswith("sealring/"):
                raise self._bad(
                    "resources", "path", "is repository/type/tag, and the repository not sealring"
                )
            ranks = self._span(entry, "resources") if "ranks" in entry else None
            named = self._kinds(entry, "resources", kinds) if "kinds" in entry else kinds
            rules.append(ResourceRules(path, ranks, frozenset(named)))
        return tuple(rules)

    def _snp(self, table: dict[str, Any]) -> KindRules:
        measurements = self._digests(table, "snp", "measurements", 48)
        signers = self._digests(table, "snp", "signers", 48)
        self._some(measurements | signers, "snp", "measurements")
        products = table.get("products", [])
        if not isinstance(products, list) or not all(one in _PRODUCTS for one in products):
            raise self._bad("snp", "products", f"is a list of {', '.join(sorted(_PRODUCTS))}")
        limits = {
            "vmpl": self._number(table, "snp", "vmpl", 0, 3, 0),
            "migration": self._number(table, "snp", "migration", 0, 1, 0),
        }
        tcb = self._tcb(table, "snp")
        return KindRules(measurements, signers, frozenset(products), tcb, limits)

    def _tcb(self, table: dict[str, Any], where: str) -> dict[str, int]:
        found = table.get("minimum_tcb", {})
        if not isinstance(found, dict):
            raise self._bad(where, "minimum_tcb", "is a table of numbers")
        self._known(found, _TCB[where], f"{where}.minimum_tcb")
        return {
            name: self._number(found, f"{where}.minimum_tcb", name, 0, 255, 0) for name in found
        }

    def _ranks(self, entries: Any, kinds: set[str]) -> tuple[RankRules, ...]:
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise self._bad("", "ranks", "is a list of tables: [[ranks]]")
        rules = []
        for entry in entries:
            self._known(entry, {"ranks", "kinds"}, "ranks")
            first, last = self._span(entry, "ranks")
            rules.append(RankRules(first, last, frozenset(self._kinds(entry, "ranks", kinds))))
        return tuple(rules)

    def _span(self, entry: dict[str, Any], where: str) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(entry.get("ranks")), re.ASCII)
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if not first <= last < MAX_WORLD:
            raise self._bad(where, "ranks", 'is "3" or "0-7"')
        return first, last

    def _kinds(self, entry: dict[str, Any], where: str, kinds: set[str]) -> list[str]:
        named = entry.get("kinds")
        if not isinstance(named, list) or not named or not all(one in kinds for one in named):
            raise self._bad(where, "kinds", "is a list of kinds that this policy describes")
        return named

    def _flag(self, table: dict[str, Any], where: str, name: str, default: bool) -> bool:
        value = table.get(name, default)
        if type(value) is not bool:
            raise self._bad(where, name, "is true or false")
        return value

    def _digests(
        self, table: dict[str, Any], where: str, name: str, size: int | None
    ) -> frozenset[str]:
        found = table.get(name, [])
        count = str(size) if size else "1,64"
        pattern = re.compile(rf"(?:[0-9a-f]{{2}}){{{count}}}")
        if not isinstance(found, list) or not all(
            isinstance(one, str) and pattern.fullmatch(one) for one in found
        ):
            size_text = f"{size} bytes each" if size else "at most 64 bytes each"
            raise self._bad(where, name, f"is a list of lower-case hexadecimal, {size_text}")
        return frozenset(found)

    def _some(self, values: frozenset[str], where: str, name: str) -> None:
        if not values:
            raise self._bad(where, name, "is empty or missing: it would admit nothing")

    def _number(
        self, table: dict[str, Any], where: str, name: str, least: int, most: int, default: int
    ) -> int:
        value = table.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._bad(where, name, f"is a number from {least} to {most}")
        return value

    def _table(self, document: dict[str, Any], name: str, known: set[str]) -> dict[str, Any]:
        table = document.get(name, {})
        if not isinstance(table, dict):
            raise self._bad("", name, f"is a table: [{name}]")
        self._known(table, known, name)
        return table

    def _known(self, table: dict[str, Any], known: set[str], where: str) -> None:
        for name in table:
            if name not in known:
                raise self._bad(
                    where, name, f"is not known here; known: {', '.join(sorted(known))}"
                )

    def _bad(self, where: str, name: str, must: str) -> BadPolicy:
        field = f"{where}.{name}" if where else name
        return BadPolicy(f"the policy, line {self._line(where, name)}: {field} {must}")

    def _line(self, where: str, name: str) -> int:
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
                inline = f"{table}.{match[1]}".lstrip(".") == where and name in line
                if (table == where and match[1] == name) or inline:
                    return number
        return at or 1
