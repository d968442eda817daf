"""Turns two identities into link keys: mutual TLS 1.3 and its exporter.

terms      what two workers must agree on, and the digests that bind it into keys and records
messages   the messages over TLS; a parser without I/O
refusals   turns an error on one side into the same error on the other
connection the base of both kinds of connection: a deadline and an exporter
tls        a TLS 1.3 connection, which never reads past its own records; OpenSSL's copy of the key
sessions   the secrets that two processes keep from TLS for later connections
resumption a connection under a session, without TLS
channel    the channel between two verified workers, and the link keys that both ends derive
peers      dial: from a socket to a channel; checks that a peer agrees with our terms
statements what every member states and signs when a group forms
incoming   accept: from a socket that a peer opened to a channel
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
