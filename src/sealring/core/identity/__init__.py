"""Who a worker is, and the proof of it.

names          job names, ranks and the URI that states both
process        protects this process's memory from others; reads secret files; names a peer process
loading        parses certificates and public keys; no other module does
kept_key       holds a worker's private key between two uses
certificates   what a certificate says, and how one is made
secret         the job secret, and the authority that every holder derives from it
credentials    this worker's identity, read from its environment
authority      an operator's own authority: `sealring ca`
verification   verifies peers; only it can make a VerifiedPeer
"""

from sealring.core.identity.credentials import Credentials, load_credentials
from sealring.core.identity.names import WorkerName
from sealring.core.identity.verification import VerifiedPeer, verify

__all__ = ["Credentials", "VerifiedPeer", "WorkerName", "load_credentials", "verify"]
