"""Which logs and witnesses to trust, and how many of them (c2sp.org/tlog-policy).

    log <vkey> [<url>]
    witness <name> <vkey> [<url>]
    group <name> all|any|<k> <name>...
    quorum <name>|none

To the format, names are opaque bytes. They are kept as text, with bytes that are not UTF-8 escaped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealring.errors import BadPolicy, MalformedStatement
from sealring.formats.files import read_public
from sealring.formats.log.notes import SignatureKind, Verifier

NONE: Final = "none"
_MAX_LINES: Final = 4096
_ALLOWED: Final = re.compile(rb"[\t\n\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, slots=True)
class Log:
    verifier: Verifier
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Witness:
    name: str
    verifier: Verifier
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    threshold: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogPolicy:
    logs: tuple[Log, ...]
    witnesses: tuple[Witness, ...] = ()
    groups: tuple[Group, ...] = ()
    quorum: str = NONE

    def keys_of(self, origin: str) -> list[Verifier]:
        return [log.verifier for log in self.logs if log.verifier.name == origin]

    def is_quorum(self, cosigners: Collection[Verifier]) -> bool:
        """Whether these witnesses make up a quorum."""
        if self.quorum == NONE:
            return True
        counted = {each.name for each in self.witnesses if each.verifier in cosigners}
        for group in self.groups:  # a group's members come before it
            if len(counted.intersection(group.members)) >= group.threshold:
                counted.add(group.name)
        return self.quorum in counted

    def encode(self) -> str:
        lines = [_line("log", log.verifier.encode(), log.url) for log in self.logs]
        lines += [_line("witness", w.name, w.verifier.encode(), w.url) for w in self.witnesses]
        lines += [_line("group", g.name, str(g.threshold), *g.members) for g in self.groups]
        return "".join([*lines, _line("quorum", self.quorum)])


def byzantine_policy(logs: Collection[Log], witnesses: Collection[Witness]) -> LogPolicy:
    """A policy for n witnesses of which fewer than a third may lie: n - (n - 1) // 3 must sign.

    For n = 3f + 1 these are 2f + 1. Two such quorums share more witnesses than may lie, so at least
    one honest witness is in both.
    """
    count = len(witnesses)
    group = Group("witnesses", count - (count - 1) // 3, tuple(each.name for each in witnesses))
    return parse_policy(
        LogPolicy(tuple(logs), tuple(witnesses), (group,), group.name).encode().encode()
    )


def read_policy(path: Path) -> LogPolicy:
    return parse_policy(read_public(path, "the log policy", BadPolicy), str(path))


def parse_policy(data: bytes, where: str = "the log policy") -> LogPolicy:
    if not _ALLOWED.fullmatch(data):
        raise BadPolicy(f"{where} has a control character other than tab and newline")
    reader = _Reader(where)
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    if len(lines) > _MAX_LINES:
        raise BadPolicy(f"{where} has more than {_MAX_LINES} lines")
    for number, line in enumerate(lines, 1):
        words = re.split(r"[ \t]+", line.strip(" \t"))
        if words != [""] and not words[0].startswith("#"):
            reader.read(number, words)
    return reader.policy()


class _Reader:
    def __init__(self, where: str) -> None:
        self._where = where
        self._line = 0
        self._logs: list[Log] = []
        self._witnesses: list[Witness] = []
        self._groups: list[Group] = []
        self._quorum: str | None = None
        self._names: set[str] = {NONE}
        self._members: set[str] = set()

    def read(self, line: int, words: list[str]) -> None:
        self._line = line
        match words:
            case ["log", vkey, *url] if len(url) <= 1:
                self._log(vkey, *url)
            case ["witness", name, vkey, *url] if len(url) <= 1:
                self._witness(name, vkey, *url)
            case ["group", name, threshold, *members]:
                self._group(name, threshold, members)
            case ["quorum", name]:
                self._set_quorum(name)
            case _:
                raise self._wrong("is not a log, witness, group or quorum line")

    def policy(self) -> LogPolicy:
        if self._quorum is None:
            raise BadPolicy(f"{self._where} has no quorum line; `quorum none` asks for no witness")
        return LogPolicy(
            tuple(self._logs), tuple(self._witnesses), tuple(self._groups), self._quorum
        )

    def _log(self, vkey: str, url: str | None = None) -> None:
        verifier = self._key(vkey, SignatureKind.NOTE, "a log's")
        if verifier.public in {log.verifier.public for log in self._logs}:
            raise self._wrong("lists a log's key a second time")
        self._logs.append(Log(verifier, url))

    def _witness(self, name: str, vkey: str, url: str | None = None) -> None:
        verifier = self._key(vkey, SignatureKind.COSIGNATURE, "a witness's")
        if verifier.public in {witness.verifier.public for witness in self._witnesses}:
            raise self._wrong("lists a witness's key a second time: one witness would count twice")
        self._define(name)
        self._witnesses.append(Witness(name, verifier, url))

    def _group(self, name: str, threshold: str, members: list[str]) -> None:
        for member in members:
            if member not in self._names or member == NONE:
                raise self._wrong(f"names {member!r}, which no line before it defines")
            if member in self._members:
                raise self._wrong(f"lists {member!r}, which is in a group already")
            self._members.add(member)
        if threshold.isascii() and threshold.isdecimal() and len(threshold) < 6:
            count = int(threshold)
        else:
            count = {"all": len(members), "any": 1}.get(threshold, 0)
        if not 1 <= count <= len(members):
            raise self._wrong(f"asks for {threshold} of {len(members)} members")
        self._define(name)
        self._groups.append(Group(name, count, tuple(members)))

    def _set_quorum(self, name: str) -> None:
        if self._quorum is not None:
            raise self._wrong("is a second quorum line")
        if name not in self._names:
            raise self._wrong(f"names {name!r}, which no line before it defines")
        self._quorum = name

    def _define(self, name: str) -> None:
        if name in self._names:
            raise self._wrong(f"defines {name!r} a second time")
        self._names.add(name)

    def _key(self, vkey: str, kind: SignatureKind, whose: str) -> Verifier:
        try:
            verifier = Verifier.parse(vkey)
        except (MalformedStatement, UnicodeEncodeError) as problem:
            raise self._wrong(f"has no key: {problem}") from None
        if verifier.kind is not kind:
            raise self._wrong(f"has a key of type {verifier.kind:#04x}; {whose} is {kind:#04x}")
        return verifier

    def _wrong(self, problem: str) -> BadPolicy:
        return BadPolicy(f"{self._where}: line {self._line} {problem}")


def _line(*words: str | None) -> str:
    return " ".join(word for word in words if word is not None) + "\n"
