"""TPM 2.0.

structures  what a TPM signs and the keys that sign it, as bytes
event_log   what the machine's firmware says it measured, replayed against the PCRs
ima         the files that the kernel measured since boot, replayed the same way
credential  a secret that only the TPM with this EK and this AK can open; made by the verifier
verify      quote, keys, chain and log in; claims out
commands    the few TPM 2.0 commands that a worker needs, over a device or a socket
machine     this machine's TPM: who it is, and evidence from it
certified   the same for a TPM whose attestation key has a certificate: Google's
"""
