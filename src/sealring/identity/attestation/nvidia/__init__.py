"""NVIDIA's GPUs and NVSwitches.

spdm       the signed report, as bytes
reference  NVIDIA's signed reference measurements (RIM)
device     report, chain and references in; AttestedDevice out
collect    this machine's GPUs asked for their reports
"""
