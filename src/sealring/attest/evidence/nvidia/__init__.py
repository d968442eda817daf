"""NVIDIA's GPUs and NVSwitches.

spdm       the signed report, as bytes
device     report, chain and references in; AttestedDevice out
collect    this machine's GPUs asked for their reports
"""
