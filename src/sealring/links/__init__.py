"""Who connects to whom, and over what.

addresses   where this worker listens: one address, never all of them
epoch       one name for one attempt to make a group
rendezvous  addresses through the store, which is the adversary's
memory      a link's shared memory: made, offered, checked
agreement   what two verified workers settle over TLS: group keys and transport
setting_up  the sockets on which links are being made, for those who look
listener    takes connections from anybody, a bounded number at a time
dialer      reaches the lower ranks, and tries again
waiting     links that have their keys and wait for the others; shared between threads
mesh        all links of a group or none: build_mesh
diagnosis   why it is not complete when its time is up
link        what comes out
"""

from sealring.links.epoch import agreed_epoch
from sealring.links.link import Link
from sealring.links.mesh import build_mesh
from sealring.links.rendezvous import Store

__all__ = ["Link", "Store", "agreed_epoch", "build_mesh"]
