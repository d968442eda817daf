"""Evidence of our own making, under roots of our own, with every knob an attacker would turn.

It shows what verification costs, and tests bend it. No pinned root leads to any of it.

certificates  authorities, and the certificates and revocation lists they issue
amd           SEV-SNP reports
azure         a virtual TPM that an SNP report vouches for
tpm           quotes and event logs
intel         TDX and SGX quotes, with their collateral
nvidia        GPU and switch reports, and reference measurements
"""
