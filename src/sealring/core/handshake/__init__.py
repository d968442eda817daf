"""Two identities in, link keys out: mutual TLS 1.3 and its exporter.

terms      what the two must agree on, and the digests that bind it into keys and records
messages   what they say over TLS; a pure parser
refusals   how an error on one side becomes the same error on the other
connection what both kinds of connection have in common: a deadline, an exporter
tls        one TLS 1.3 connection, which never reads past its own records; OpenSSL's copy of the key
sessions   what two processes keep of it for later connections
resumption one connection under a session, without TLS
channel    the channel between two verified workers, and the link keys that both ends derive
peers      dial: from a socket to a channel; whether a peer agrees with our terms
statements what every member states and signs when a group forms
incoming   accept: the same for the other end
"""

from sealring.core.handshake.channel import LinkKeys, SecureChannel
from sealring.core.handshake.incoming import Incoming, accept
from sealring.core.handshake.messages import Hello, parse_hello, parse_message
from sealring.core.handshake.peers import dial
from sealring.core.handshake.sessions import SessionTable, process_sessions
from sealring.core.handshake.terms import Terms, group_context

__all__ = [
    "Hello",
    "Incoming",
    "LinkKeys",
    "SecureChannel",
    "SessionTable",
    "Terms",
    "accept",
    "dial",
    "group_context",
    "parse_hello",
    "parse_message",
    "process_sessions",
]
