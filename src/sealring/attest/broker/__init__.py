"""Who may be which rank, decided by evidence: the broker, and a worker's way to it.

keys        a broker's keys, all from its authority's; the certificates that it issues; the data
            keys that it gives out
envelopes   what is given out, sealed to the worker (JWE)
messages    the KBS protocol's JSON, and errors on their way to a client
tokens      nonces, TPMs' credentials, and the verdict as a token (EAR): known again without having
            been kept
store       decisions as functions on a view, committed whole, in SQLite; etcd keeps them too
authenticated  the store's rows, checked against a MAC: what others wrote there is noticed
audit       the log of decisions, a Merkle tree of which every root is signed
            and published as a folder that witnesses see grow
ledger      who holds which rank, what was used, what vaults last held, which guests have attested;
            machines and ranks that may not join
strangers   what was refused before anything was proven, counted
service     the broker without a network
tls         the network; `sealring.formats.http` listens, with a limit on everything
server      the broker on its ports: which request asks what, and its page

client      conversations with a broker
enrolment   a worker's certificate, held and renewed while it trains

Its packages are the extra `broker`.
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
