"""TPM 2.0.

structures  the bytes that a TPM signs, and the keys that sign them
event_log   the firmware's log of what it measured, replayed against the PCRs
ima         the kernel's list of files that it measured since boot, replayed against PCR 10
credential  made by the verifier: a secret that only the TPM with this EK and this AK can open
verify      checks quote, keys, chain and logs; returns claims
commands    the few TPM 2.0 commands that a worker needs, over a device or a socket
machine     this machine's TPM: its identity and its evidence, also for a TPM whose attestation key
            has a certificate (Google's)
"""
