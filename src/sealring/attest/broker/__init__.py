"""The broker, which decides by evidence who may be which rank, and a worker's client for it.

keys        the broker's keys, all derived from its authority's key; the certificates that it
            issues; the data keys that it gives out
envelopes   encrypts what the broker gives out to the worker's key (JWE)
messages    the KBS protocol's JSON, and errors as answers to a client
tokens      nonces, TPM credentials, and the verdict as a signed token (EAR). The broker keeps no
            copy of a token: it checks the signature
store       decisions as functions on a view, committed whole or not at all, in SQLite or etcd
authenticated  checks the store's rows against a MAC, so that a row that others wrote is noticed
audit       the log of decisions: a Merkle tree whose every root is signed, published as a folder
            that witnesses see grow
ledger      who holds which rank, which nonces and tokens were used, the newest version of each
            vault, which guests have attested, which machines and ranks may not join
strangers   counts the requests that were refused before anything was proven
service     the broker without a network
tls         the network; `sealring.formats.http` listens, with a limit on everything
server      the broker on its ports: the HTTP routes, and the status page

client      conversations with a broker
enrolment   a worker's certificate, held and renewed while it trains

The packages that the broker needs are the extra `broker`.
"""

from __future__ import annotations

from sealring.errors import ConfigurationError

try:
    import h11  # noqa: F401
    import joserfc  # noqa: F401
except ImportError as missing:
    raise ConfigurationError(
        f"the broker, and workers that join through one, need the package {missing.name}: "
        "pip install 'sealring[broker]'",
        code="configuration.missing_extra",
    ) from None

from sealring.attest.broker.enrolment import data_key, enrolled, this_worker

__all__ = ["data_key", "enrolled", "this_worker"]
