"""The core: everything that a sealed process group needs, from a tensor to sealed bytes on a link.

identity     who a worker is: certificates, the job secret, and their verification
handshake    makes the keys of a link from two identities
links        who connects to whom, over TCP or shared memory
schedule     a collective as a program of steps
engine       runs programs, on CPUs and GPUs
group        the process group that torch uses
store        torch's store, sealed
sealed_only  refuses traffic in plaintext beside a sealed job
hooks        slots that other packages fill; `PROVIDERS` names who fills them

The core imports only one other package of sealring, `formats`.
"""
