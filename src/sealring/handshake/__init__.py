"""Two identities in, link keys out: mutual TLS 1.3 and its exporter.

terms      what the two must agree on, and the digests that bind it into keys and records
messages   what they say over TLS; a pure parser
refusals   how an error on one side becomes the same error on the other
tls        one TLS 1.3 connection with a deadline, which never reads past its own records
link_keys  the keys that both ends derive from it
channel    dial, accept, and the channel that they give
"""

from sealring.handshake.channel import Incoming, SecureChannel, accept, dial
from sealring.handshake.link_keys import LinkKeys
from sealring.handshake.messages import Hello, parse_hello, parse_message
from sealring.handshake.terms import Terms, group_context

__all__ = [
    "Hello",
    "Incoming",
    "LinkKeys",
    "SecureChannel",
    "Terms",
    "accept",
    "dial",
    "group_context",
    "parse_hello",
    "parse_message",
]
