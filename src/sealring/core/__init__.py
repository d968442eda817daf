"""From a tensor to sealed bytes on a link, and back: what every process group needs.

identity     who a worker is: certificates, a job's secret, and what proves them
handshake    two identities become the keys of a link
links        who connects to whom, over TCP or shared memory
schedule     a collective as a program of steps
engine       what runs programs, on CPUs and GPUs
group        the face to torch
store        torch's store, sealed
sealed_only  no traffic in the clear beside a sealed job
hooks        what the core asks of other rooms; `providers` names who answers

It imports no other room but `formats`.
"""
