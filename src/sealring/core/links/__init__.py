"""Who connects to whom, and over what.

addresses   where this worker listens: one address, never all of them
epoch       one name for one attempt to make a group
store_calls calls of the store that end in time, whether it answers or not
rendezvous  addresses through the store, which is the adversary's
memory      a link's shared memory: made, offered, checked
agreement   what two verified workers settle before records flow: the transport
setting_up  the sockets on which links are being made, for those who look
listening   a socket that listens
unproven    connections whose peer is not admitted yet, and which of them give way
shares      what the listeners of one process may hold together
tls_threads threads that compute TLS for connections of others
listener    takes connections from anybody, a bounded number at a time
admitted    those whose peer is admitted, until each is a link
dialer      reaches the lower ranks, and tries again
waiting     links that have their keys and wait for the others; shared between threads
tree        one round along a tree over the members
forming     what all members agree on, in three rounds
settling    what neighbours say until the group exists
formed      what the late links of a group have in common
late_kind   links that are made when they are first needed: of collectives, or of messages
late        all of them, and their end
connections what is done with an attempt's connections
own_address the address that the store shows for this worker
mesh        a group forms, or does not: build_mesh
lacks       no descriptor, thread or memory is left for that
diagnosis   why it is not complete when its time is up
link        what comes out
"""

from sealring.core.links.epoch import agreed_epoch, run_of
from sealring.core.links.forming import Agreed
from sealring.core.links.lacks import lack_is_named
from sealring.core.links.link import Link
from sealring.core.links.mesh import Mesh, build_mesh
from sealring.core.links.rendezvous import Store

__all__ = [
    "Agreed",
    "Link",
    "Mesh",
    "Store",
    "agreed_epoch",
    "build_mesh",
    "lack_is_named",
    "run_of",
]
