"""A vault's header while a process has it open: its keys, its ledger, and changes of its keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from sealring.core.hooks import VaultEntry
from sealring.errors import (
    ConfigurationError,
    DiskFull,
    NotAVault,
    RolledBack,
    SealringError,
    VaultBusy,
    VaultError,
)
from sealring.formats.files import writing
from sealring.vault import header as headers
from sealring.vault.closing import Closable
from sealring.vault.keys import Holder, Opener, Presented, SymmetricKey
from sealring.vault.ledger import Ledger, ledger_of
from sealring.vault.sealed import LARGEST_DOCUMENT, check_small
from sealring.vault.storage import VaultPath

_LOG = logging.getLogger("sealring")
HEADER: Final = "vault.json"


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The result of giving the vault a new key."""

    versions: int
    """How many versions were sealed again, or had their keys wrapped again."""
    dropped: list[str]
    """The names of the grants that were left out: their holders were not presented."""


Tell = Callable[[Sequence[str]], None]
"""Called with the names of the grants that are left out, before the header is written."""


def tell_later(names: Sequence[str]) -> None:
    """Does nothing, for callers that read the names in KeyChange afterwards."""


class OpenedHeader(Closable):
    """An open vault without its objects: the header, the keys and the ledger."""

    def __init__(
        self, path: VaultPath, opener: Opener, expect: str | None = None, *, made_now: bool = False
    ) -> None:
        self.path = path
        self._what = f"the vault {path}"
        self._held_opener: Opener | None = opener
        self._seen = 0, 0
        self._id = expect
        self._ledger: Ledger | None = None
        self._told_of_ledger = False
        self.refresh(made_now=made_now)

    def _release(self) -> None:
        """Wipes the keys. The opener is not wiped: the caller may open other vaults with it."""
        self._ring.wipe()
        self._held_opener = None

    @property
    def _opener(self) -> Opener:
        self.require_open()
        assert self._held_opener is not None
        return self._held_opener

    @property
    def ring(self) -> headers.KeyRing:
        self.require_open()
        return self._ring

    def _bind(self, made_now: bool) -> None:
        try:
            self.ledger.bind(self.path, made_now=made_now, record=self._opener.may_write)
        except (OSError, DiskFull) as problem:
            self._tell_of_ledger(problem)

    def _tell_of_ledger(self, problem: OSError | DiskFull) -> None:
        """Warns that the ledger cannot be written; only once."""
        if not self._told_of_ledger:
            self._told_of_ledger = True
            _LOG.warning("sealring: the ledger %s is not kept: %s", self.ledger.where, problem)

    def refresh(self, *, made_now: bool = False) -> None:
        """Reads the header again: a rotation may have changed the vault's key meanwhile.

        Raises RolledBack if the header is older than one that this process or the ledger has seen.
        """
        self.require_open()
        path = self.path / HEADER
        if not path.has_file():
            raise NotAVault(f"there is no vault in {self.path}: `sealring vault init` makes one")
        (self.path / "objects").refuse_link()
        content = path.read_small("the vault's header", LARGEST_DOCUMENT)
        header = headers.read_header(content, str(self.path / HEADER))
        ring = headers.open_header(header, self._opener, f"the vault {self.path}")
        if self._id not in (None, header.id):
            raise VaultError(
                f"{self.path} holds the vault {header.id} and not {self._id}: another vault was "
                "put in its place, or the path is wrong",
                code="vault.foreign",
            )
        self._id = header.id
        if self._ledger is None:
            self._ledger = ledger_of(header.id, self.path)
            self._bind(made_now)
        self._require_as_new(header)
        self.header, self._ring = header, ring

    def _require_as_new(self, header: headers.Header) -> None:
        # Compares the key number first: a holder of an older key can forge any generation.
        state = header.key, header.generation
        recorded = self.ledger.state()
        for known, who in ((self._seen, "this process has seen"),
                           (recorded, f"{self.ledger.where} has recorded")):  # fmt: skip
            if state < known:
                raise RolledBack(
                    f"the vault's header is number {state[1]} with key {state[0]}, and {who} "
                    f"number {known[1]} with key {known[0]}: an older header lies there. Restore "
                    "the newest, or remove the ledger if you put the older one there yourself"
                )
        self._seen = state
        if state > recorded:
            self.record_quietly(state)

    def record_quietly(self, state: tuple[int, int], entry: VaultEntry | None = None) -> None:
        """Records a state; only warns if the ledger cannot be written, so that readers can go on.

        A header that a person's identity opens is not recorded. Anyone can make one for a public
        key, with any vault's id in it, and the real vault would then look older.
        """
        if self._opener.may_write:
            try:
                self.ledger.record(*state, entry)
            except (OSError, DiskFull) as problem:
                self._tell_of_ledger(problem)

    @property
    def ledger(self) -> Ledger:
        self.require_open()
        assert self._ledger is not None, "refresh"
        return self._ledger

    def require_writer(self) -> None:
        if not self._opener.may_write:
            raise VaultError(
                "a person's identity reads a vault and does not write to it: anyone can make a "
                "header for a public key. Write with a key file or through the broker",
                code="vault.not_granted",
            )

    def require_key(self, number: int, name: str) -> None:
        """Raises VaultBusy if the vault's key changed since a save began under key `number`.

        A holder that was revoked meanwhile may know the save's key.
        """
        if self.ring.newest != number:
            raise VaultBusy(
                f"{self.path} got key {self.ring.newest} while {name!r} was saved under key "
                f"{number}: save it again",
                code="vault.keys_changed",
            )

    def held(self, *, alone: bool, wait: bool = True) -> AbstractContextManager[None]:
        self.require_open()
        return self.path.held(alone=alone, wait=wait)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps a rotation from removing what is read, where the vault can be locked."""
        with ExitStack() as stack:
            with suppress(OSError, DiskFull):  # a directory that this user cannot write to
                stack.enter_context(self.held(alone=False))
            self.refresh()
            yield

    def grant(self, name: str, holder: Holder) -> None:
        """Grants the vault to one more holder: wraps its present key for the holder."""
        self.require_writer()
        with self.held(alone=True):
            self.refresh()
            which = self.header.vault, self.header.key, self.ring.key
            for one in self.header.grants:
                if holder.has(one, *which):
                    raise ConfigurationError(
                        f"this holder has the grant {one.name!r} already: with two of them, it "
                        "would keep one when the other is revoked"
                    )
            made = holder.grant(name, *which)
            self._write(headers.with_grant(self.header, self.ring, made))

    def begin_rotation(
        self, header: headers.Header, also: Sequence[Presented], tell: Tell
    ) -> KeyChange:
        """Adds a new key to the vault and keeps the older ones. The caller holds the vault alone.

        `also`: other holders that shall get the new key.
        """
        assert isinstance(self._opener, SymmetricKey), "require_writer"
        made, ring = headers.next_key(header, self.ring, [self._opener, *also])
        kept = {grant.name for grant in made.grants}
        dropped = [one.name for one in header.grants if one.name not in kept]
        tell(dropped)  # first: the rest can fail or be interrupted
        self._ring = ring
        self._write(made)
        return KeyChange(0, dropped)

    def end_rotation(self, problems: Sequence[SealringError]) -> None:
        """Drops the older keys, if no object needs them.

        If there are problems, it keeps the older keys, wrapped under the new key, and raises the
        first problem: an object that did not open may be restored from a copy whose key is wrapped
        under an older key.
        """
        if problems:
            raise type(problems[0])(
                f"{problems[0]} ({len(problems)} in all did not open and stay as they are. All "
                "others have the new key. Restore them from a copy, or remove what never was an "
                "object of this vault, and run `sealring vault rotate --keys-only`: until "
                "then the vault accepts objects under its older keys too)"
            )
        header, self._ring = headers.without_older_keys(self.header, self.ring)
        self._write(header)

    def _write(self, header: headers.Header) -> None:
        advice = "revoke grants, or give several people one key"
        content = headers.write_header(header)
        check_small(content, "the vault's header", advice, LARGEST_DOCUMENT)
        # Tries the ledger first: if it cannot be written, the change stops before it begins.
        with writing(f"nothing was changed: the ledger {self.ledger.where}"):
            self.ledger.record(*self._seen)
        (self.path / HEADER).write(content)
        self.header = header
        self._seen = header.key, header.generation
        self.ledger.record(header.key, header.generation)
