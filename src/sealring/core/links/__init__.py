"""Who connects to whom, and over what.

addresses   where this worker listens: one address, never all of them
epoch       one name for one attempt to make a group
rendezvous  addresses through the store, which is the adversary's; calls of it that end in time
descriptors how descriptors get from one process to another
memory      a link's shared memory: made, offered, checked
agreement   what two verified workers settle before records flow: the transport
setting_up  the sockets on which links are being made, for those who look
arrivals    connections that others made, until each is a link, and how many there may be
threads     the thread that serves all listeners, and threads that set-up borrows
listener    takes connections from anybody, a bounded number at a time
dialer      opens the pipes that this worker dials, and tries again; watches its own address
exchange    opens every pipe of a group once it has formed: for collectives, lanes, messages
connections first links that wait for the others, and what is done with an attempt's connections
tree        one round along a tree over the members
forming     what all members agree on, in three rounds
settling    what neighbours say until the group exists
mesh        a group forms, or does not: build_mesh
diagnosis   why a group is not complete in time; limits of this process that kept it from forming
link        what comes out
"""

from sealring.core.links.diagnosis import explain_resource_limits
from sealring.core.links.epoch import agreed_epoch, run_of
from sealring.core.links.forming import Agreed
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
    "explain_resource_limits",
    "run_of",
]
