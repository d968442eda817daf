"""Rules of a policy. One object reads a rule from TOML, judges by it, describes it and writes it.

A table of a policy has a TableForm: the rules that it may state, and those that it must state. It
must state every rule without which something known gets in: an image of other firmware, an older
image of the same signer, a machine that its vendor no longer calls safe. A table without such a
rule must name it under `unchecked`. Each kind of evidence has its own TableForm (verify.py lists
them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from sealring.attest.evidence.worker import DescribedWorker
from sealring.errors import BadPolicy


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome of one rule for one worker."""

    name: str
    wanted: str
    found: str
    refusal: str | None
    """None if it passed."""


Finding = tuple[str, bool, str, str]
"""The name of the check, whether it passes, what is wanted and what is found."""


def any_of(names: Collection[str], none: str = "nothing") -> str:
    return " or ".join(sorted(names)) or none


def shown(value: int | None) -> str:
    return "not stated" if value is None else str(value)


def at_least(name: str, has: int | None, least: int) -> Finding:
    return name, has is not None and has >= least, f"at least {least}", shown(has)


def at_most(name: str, has: int | None, most: int) -> Finding:
    return name, has is not None and has <= most, f"at most {most}", shown(has)


def distinct(found: Iterable[str]) -> list[str]:
    return sorted({one for one in found if one})


@dataclass(slots=True)
class Document:
    """The text of a policy, used to find the line of a mistake."""

    lines: Sequence[str] = ()
    missing: list[str] = field(default_factory=list)
    """Messages about rules that a table must state or name under `unchecked`, and does not."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a policy, as TOML reads it."""

    values: Mapping[str, Any]
    where: str = ""
    document: Document = field(default_factory=Document)

    def inner(
        self, name: str, what: str = "a table", known: Collection[str] | None = None
    ) -> Table:
        """The table with this name. Empty if it is missing."""
        found = self.values.get(name, {})
        path = f"{self.where}.{name}".lstrip(".")
        if not isinstance(found, dict):
            raise self.bad(name, f"is {what}: [{path}]")
        inner = Table(found, path, self.document)
        if known is not None:
            inner.only(known)
        return inner

    def entries(self, name: str) -> list[Table]:
        """The tables of [[name]]. Empty if there are none."""
        found = self.values.get(name, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self.bad(name, f"is a list of tables: [[{name}]]")
        return [Table(one, name, self.document) for one in found]

    def read(self, types: Mapping[str, Type]) -> dict[str, Any]:
        """Reads all fields by their types. A field that is not in `types` is refused."""
        self.only(types)
        return {name: read(self, name) for name, read in types.items()}

    def only(self, known: Collection[str]) -> None:
        for name in self.values:
            if name not in known:
                raise self.bad(name, f"is not known here; known: {', '.join(sorted(known))}")

    def bad(self, name: str, must: str) -> BadPolicy:
        path = f"{self.where}.{name}" if self.where else name
        return BadPolicy(f"the policy, line {self.line(name)}: {path} {must}")

    def line(self, name: str) -> int:
        """The line of the field; else the line where its table starts; else 1."""
        table, at, where = "", 0, self.where
        for number, line in enumerate(self.document.lines, 1):
            if match := re.match(r"\s*\[+\s*([\w.\s-]+?)\s*\]+", line):
                table = match[1].replace(" ", "")
                if table in (where, path := f"{where}.{name}".lstrip(".")):
                    at = at or number
                    if table == path:
                        return number
            elif match := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line):
                # An inline table such as `minimum_tcb = {snp = 8}` has its fields in this line.
                path = f"{table}.{match[1]}".lstrip(".")
                inline = f"{where}.".startswith(f"{path}.") and name in line
                if (table == where and match[1] == name) or inline:
                    return number
        return at or 1


Type = Callable[[Table, str], Any]
"""Reads a field of a table, or raises BadPolicy."""


def number(least: int, most: int, default: int | None = 0) -> Type:
    def read(table: Table, name: str) -> int | None:
        if name not in table.values:
            return default
        value = table.values[name]
        if type(value) is not int or not least <= value <= most:
            raise table.bad(name, f"is a number from {least} to {most}")
        return value

    return read


def flag(default: bool) -> Type:
    def read(table: Table, name: str) -> bool:
        value = table.values.get(name, default)
        if type(value) is not bool:
            raise table.bad(name, "is true or false")
        return value

    return read


def list_of(
    fits: Callable[[str], object], must: str, default: Collection[str] = ()
) -> Callable[[Table, str], frozenset[str]]:
    """Reads a list of texts that all fit."""

    def read(table: Table, name: str) -> frozenset[str]:
        found = table.values.get(name, list(default))
        if not isinstance(found, list) or not all(
            isinstance(one, str) and fits(one) for one in found
        ):
            raise table.bad(name, must)
        return frozenset(found)

    return read


def words(
    known: Collection[str] | None = None, default: Collection[str] = (), longest: int = 63
) -> Type:
    if known:
        return list_of(known.__contains__, f"is a list of {', '.join(sorted(known))}", default)
    return list_of(lambda one: 0 < len(one) <= longest, "is a list of words", default)


def digests(*sizes: int) -> Type:
    """Reads a list of digests of these sizes in bytes. Without sizes, of at most 64 bytes."""
    counts = [str(size) for size in sizes] or ["1,64"]
    pattern = re.compile("|".join(rf"(?:[0-9a-f]{{2}}){{{count}}}" for count in counts))
    listed = " or ".join(map(str, sizes)) or "at most 64"
    return list_of(pattern.fullmatch, f"is a list of lower-case hexadecimal, {listed} bytes each")


def some(read_list: Type) -> Type:
    def read(table: Table, name: str) -> Any:
        values = read_list(table, name)
        if not values:
            raise table.bad(name, "is empty or missing: it would admit nothing")
        return values

    return read


def digest_lists(sizes: Mapping[str, tuple[int, ...]] | None, *any_key: int) -> Type:
    """Reads a table of lists: {4 = ["..."], 7 = ["...", "..."]}. Unknown keys are refused.

    Without `sizes` any key is allowed, and its digests have one of the sizes `any_key`.
    """

    def read(table: Table, name: str) -> dict[str, frozenset[str]]:
        found = table.inner(name, "a table of lists", sizes)
        return {
            key: some(digests(*(any_key if sizes is None else sizes[key])))(found, key)
            for key in found.values
        }

    return read


def numbers(known: Collection[str], most: int) -> Type:
    def read(table: Table, name: str) -> dict[str, int]:
        found = table.inner(name, "a table of numbers", known)
        return {key: number(0, most)(found, key) for key in found.values}

    return read


class Prompter(Protocol):
    """Asks a person for a rule's value."""

    def values(self, question: str, none: str = "none") -> list[str]:
        """Asks for a list. `none` says what an empty answer means."""

    def choice(self, question: str, known: Sequence[str]) -> str: ...


Workers = Sequence[DescribedWorker]


@dataclass(frozen=True, slots=True)
class Rule:
    """One field of a policy's table. The defaults of this class do nothing."""

    name: str
    read: Type
    comment: str = ""
    """The comment above it in a written policy."""
    question: str = ""
    """The question to a person who has no evidence to write a policy from."""
    refusal: ClassVar[str] = "policy.guest_not_allowed"

    def stated(self, value: Any) -> Collection[str]:
        """The names that this value states, as `unchecked` would spell them."""
        return () if value is None or value in ({}, frozenset()) else (self.name,)

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        return ()

    def weak(self, rules: Rules) -> Iterable[str]:
        """Descriptions of what this value admits and the strict value would not."""
        return ()

    def write(self, workers: Workers) -> Any:
        """The strictest value, in TOML's form, that admits all of these workers. None: no line."""
        return None

    def opened(self, workers: Workers) -> list[str]:
        """Further rules that must be left open so that all of these workers are admitted."""
        return []

    def ask(self, prompter: Prompter) -> Any:
        """Asks a person for the value, in TOML's form. None: this rule has no question."""
        return prompter.values(self.question) if self.question else None


@dataclass(frozen=True, slots=True)
class Need:
    """A rule that must be stated, unless `unchecked` names it."""

    name: str
    passes: str
    """Who is admitted if the rule is left out."""
    only_with: str = ""
    """The rule is needed only if this other rule is stated."""
    holds: bool = False
    """True if the rule needs no value. It applies unless `unchecked` names it."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """What a table of a policy may state and what it must state."""

    rules: tuple[Rule, ...]
    needs: tuple[Need, ...] = ()
    one_of: tuple[tuple[str, ...], ...] = ()
    """Groups of rules. One rule of each group must be stated, or the table would admit nothing."""

    def read(self, table: Table) -> Rules:
        names = [rule.name for rule in self.rules]
        table.only([*names, "unchecked"] if self.needs else names)
        unchecked: frozenset[str] = words()(table, "unchecked")
        values = {rule.name: rule.read(table, rule.name) for rule in self.rules}
        for group in self.one_of:
            if not any(values[name] for name in group):
                raise table.bad(group[0], "is empty or missing: it would admit nothing")
        asked, unstated = self.unstated(values)
        for need in unstated:
            if need.name not in unchecked:
                table.document.missing.append(
                    f"line {table.line(need.name)}: {table.where}.{need.name} is missing: "
                    f"{need.passes}. State it, or leave it open in so many words: "
                    f'unchecked = ["{need.name}"] in [{table.where}]'
                )
        for need in asked:
            if need.name in unchecked and need not in unstated and not need.holds:
                raise table.bad("unchecked", f"names {need.name}, which is stated")
        known = {need.name for need in asked}
        if idle := ", ".join(sorted(unchecked - known)):
            could = ", ".join(sorted(known)) or "nothing"
            raise table.bad("unchecked", f"names {idle}; this table can leave open: {could}")
        return Rules(self, values, unchecked)

    def unstated(self, values: Mapping[str, Any]) -> tuple[list[Need], list[Need]]:
        """The needs that apply beside these values, and those of them that are not stated."""
        stated = {name for rule in self.rules for name in rule.stated(values[rule.name])}
        asked = [one for one in self.needs if not one.only_with or one.only_with in stated]
        return asked, [one for one in asked if not one.holds and one.name not in stated]

    def passes(self, name: str) -> str:
        return next(need.passes for need in self.needs if need.name == name)


@dataclass(frozen=True, slots=True)
class Rules:
    """What one table of a policy states."""

    form: TableForm
    values: Mapping[str, Any]
    unchecked: frozenset[str] = frozenset()
    """The rules that the policy explicitly leaves open."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str) -> Any:
        """The value of a rule. None if the table has no such rule."""
        return self.values.get(name)

    def judge(self, worker: DescribedWorker) -> list[Judged]:
        return [
            Judged(name, wanted, found, None if passed else rule.refusal)
            for rule in self.form.rules
            for name, passed, wanted, found in rule.judge(self, worker)
        ]

    def weaknesses(self) -> list[str]:
        left = [(name, self.form.passes(name)) for name in sorted(self.unchecked)]
        told = [f"{name} is not checked: {passes}." for name, passes in left]
        return [*told, *(text for rule in self.form.rules for text in rule.weak(self))]


class Measurements(Rule):
    """Judges the launch by its measurement or, where the table has `signers`, by its signer."""

    refusal = "policy.measurement_not_allowed"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        listed, signers = rules["measurements"], rules.get("signers") or ()
        known = worker.measurement in listed or worker.signer in signers
        wanted = f"one of {len(listed)} measurements or {len(signers)} signers"
        yield "measurement", known, wanted, worker.measurement

    def write(self, workers: Workers) -> Any:
        return distinct(one.measurement for one in workers)


def measurements(*sizes: int) -> Rule:
    comment = "What was launched. Compare it with your own build of the image."
    asked = "Measurements, hexadecimal"
    return Measurements("measurements", digests(*sizes), comment, asked)


ROOTS: Final = Rule(
    "roots",
    digests(32),
    "SHA-256 of the maker's root certificate. Compare it with the maker's own copy.",
    "SHA-256 of the maker's root certificate",
)
"""The roots that the verifier trusts for this kind (trust.py)."""


@dataclass(frozen=True, slots=True)
class Registers(Rule):
    """Each listed register must hold one of its listed values."""

    prefix: str = ""
    """What a register's name has before the table's key, for example pcr."""
    written: tuple[str, ...] = ()
    """The keys that are written from evidence, or asked for."""
    unless_zero: bool = False
    """If true, a key is written only if its value is not all zeros, and is never asked for."""
    refusal: ClassVar[str] = "policy.measurement_not_allowed"

    def stated(self, value: Mapping[str, Any]) -> Collection[str]:
        return [f"{self.prefix}{key}" for key in value]

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        for key, values in rules[self.name].items():
            has = worker.registers.get(f"{self.prefix}{key}", "not quoted")
            yield f"{self.prefix}{key}", has in values, f"one of {len(values)} values", has

    def write(self, workers: Workers) -> Any:
        table = {}
        for key in self.written:
            values = [one.registers.get(f"{self.prefix}{key}", "") for one in workers]
            if all(values) and not (self.unless_zero and set("".join(values)) == {"0"}):
                table[key] = distinct(values)
        return table

    def ask(self, prompter: Prompter) -> Any:
        asked = () if self.unless_zero else self.written
        found = {key: prompter.values(f"Values of {self.prefix}{key}") for key in asked}
        return {key: values for key, values in found.items() if values}


class Events(Registers):
    """The registers may have been extended only with listed values, as a replayed log shows."""

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        for key, allowed in rules[self.name].items():
            digests = worker.events.get(f"{self.prefix}{key}")
            others = [one for one in digests or () if one not in allowed]
            found = f"{len(digests or ())}, others: {' '.join(others) or 'none'}"
            wanted = f"only events of {len(allowed)} listed"
            passed = digests is not None and not others
            found = "no log" if digests is None else found
            yield f"{self.prefix}{key} events", passed, wanted, found


class MinimumTcb(Rule):
    """The least version of each part of a TCB, by product."""

    refusal = "policy.tcb_too_old"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        minimum = rules[self.name]
        launch = any(need.name == "launch_tcb" for need in rules.form.needs)
        launch = launch and "launch_tcb" not in rules.unchecked
        if worker.product in minimum:
            found = {"tcb": worker.tcb} | ({"launch tcb": worker.launch_tcb} if launch else {})
            for which, parts in found.items():
                for part, least in minimum[worker.product].items():
                    yield at_least(f"{which} {part}", parts.get(part), least)
        elif minimum:
            listed = (
                f"{product} of at least {', '.join(f'{part} {least}' for part, least in parts)}"
                for product, parts in ((one, minimum[one].items()) for one in sorted(minimum))
            )
            when = ", now and when the guest was launched" if launch else ""
            yield "tcb", False, f"{' or '.join(listed)}{when}", worker.product

    def weak(self, rules: Rules) -> Iterable[str]:
        for product, parts in rules[self.name].items():
            if parts and not any(parts.values()):
                what = f"any firmware and microcode of {product} passes"
                yield f"{self.name}: {what}, since 0 is any."


def minimum_of(product: str, read_parts: Type) -> Type:
    """Reads the minimum of a kind of evidence that has only one product."""

    def read(table: Table, name: str) -> dict[str, dict[str, int]]:
        found = read_parts(table, name)
        return {product: found} if found else {}

    return read


@dataclass(frozen=True, slots=True)
class Limit(Rule):
    """The most that a fact of the launch may be, for example vmpl 0.

    If the rule is a flag, its other value allows what is otherwise refused.
    """

    fact: str = ""
    strict: int | bool = 0
    weakness: str = ""
    """Who is admitted with any value but the strict one."""

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        yield at_most(self.fact, worker.guest.get(self.fact), self._most(rules))

    def weak(self, rules: Rules) -> Iterable[str]:
        if most := self._most(rules):
            yield f"{self.name}: {self.weakness.format(most)}"

    def write(self, workers: Workers) -> Any:
        most = max(one.guest.get(self.fact, 0) for one in workers)
        if type(self.strict) is int:
            return most
        return (not self.strict) if most else None

    def _most(self, rules: Rules) -> int:
        """The most that the fact may be. For a flag, 1 if it does not have its strict value."""
        return abs(int(rules[self.name]) - int(self.strict))


def limit(fact: str, most: int, weakness: str) -> Rule:
    return Limit(fact, number(0, most), fact=fact, weakness=weakness)


def refused_unless(name: str, fact: str, weakness: str, *, strict: bool = False) -> Rule:
    """A flag of a policy: the fact is refused unless the flag has its other value."""
    return Limit(name, flag(strict), fact=fact, strict=strict, weakness=weakness)
