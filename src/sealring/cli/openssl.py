"""Which OpenSSL libraries this process uses, and whether they are known to lack security fixes.

There are up to three. Sealring's records use the system's library or one that is built in. TLS
between workers uses the one in the wheel of `cryptography`. Python's `ssl` has one for other uses.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

AS_OF: Final = date(2026, 10, 1)
"""When the tables below were last compared with OpenSSL's releases."""
NEWEST_FIX: Final = {(3, 0): 22, (3, 4): 6, (3, 5): 8, (3, 6): 5, (4, 0): 3}
"""For each branch, the newest patch release that fixes a known vulnerability."""
ENDED: Final = {
    (3, 0): date(2026, 9, 7),
    (3, 1): date(2025, 3, 14),
    (3, 2): date(2025, 11, 23),
    (3, 3): date(2026, 4, 9),
    (3, 4): date(2026, 10, 22),
}
"""When OpenSSL's own support of a branch ended or ends."""
_LIST_IS_OLD: Final = timedelta(days=180)


@dataclass(frozen=True, slots=True)
class Library:
    use: str
    text: str
    """OpenSSL's own version text."""
    number: int
    """OPENSSL_VERSION_NUMBER: 0xMNN00PP0."""
    maintained_by: str
    """Who maintains the library; empty if only OpenSSL's own project does."""

    @property
    def branch(self) -> tuple[int, int]:
        return self.number >> 28, self.number >> 20 & 0xFF

    @property
    def patch(self) -> int:
        return self.number >> 4 & 0xFF


def libraries() -> Iterator[Library]:
    from OpenSSL import SSL

    from sealring import _native

    yield Library(
        "records",
        _native.openssl_version() + (", built into sealring" if _native.OPENSSL_BUILT_IN else ""),
        _native.openssl_version_number(),
        maintained_by="" if _native.OPENSSL_BUILT_IN else "the system's distribution",
    )
    tls = SSL.OpenSSL_version(SSL.OPENSSL_VERSION).decode()
    yield Library("handshake", tls, SSL.OPENSSL_VERSION_NUMBER, maintained_by="")
    number = ssl.OPENSSL_VERSION_NUMBER
    yield Library("Python", ssl.OPENSSL_VERSION, number, "the system's distribution")


def what_is_wrong(library: Library, today: date | None = None) -> str | None:
    """Why the library should be replaced; None if there is no known reason."""
    today = today or datetime.now(UTC).date()
    major, minor = library.branch
    newest = NEWEST_FIX.get(library.branch)
    if newest is not None and library.patch < newest:
        return f"{major}.{minor}.{newest} fixes vulnerabilities (as of {AS_OF})"
    ended = ENDED.get(library.branch)
    # A distribution may still fix an old branch without changing its version number.
    if ended is not None and today >= ended and (not library.maintained_by or newest is None):
        return f"OpenSSL {major}.{minor} gets no fixes since {ended}"
    if library.branch < min(NEWEST_FIX):
        return f"OpenSSL {major}.{minor} gets no fixes any more"
    return None


def age_of_list(today: date | None = None) -> str | None:
    """A warning if the tables above are too old to rely on; else None."""
    age = (today or datetime.now(UTC).date()) - AS_OF
    if age <= _LIST_IS_OLD:
        return None
    return f"sealring's list of OpenSSL's fixes is of {AS_OF}, {age.days} days old"
