"""Who a worker is and why we believe it.

names          job names, ranks and the URI that states both
process        a process that shows its memory to no other; secrets on disk; who a peer process is
loading        the one place where certificates and public keys are parsed
kept_key       a worker's private key between two uses
certificates   what a certificate says, and how one is made
secret         the job secret, and the authority that every holder derives from it
credentials    what this worker proves itself with, from its environment
authority      an operator's own authority: `sealring ca`
verification   the only maker of a VerifiedPeer
"""

from sealring.core.identity.credentials import Credentials, load_credentials
from sealring.core.identity.names import WorkerName
from sealring.core.identity.verification import VerifiedPeer, verify

__all__ = ["Credentials", "VerifiedPeer", "WorkerName", "load_credentials", "verify"]
