"""Forms that several parts share: how bytes from anywhere are read, and how files are written.

strict               untrusted JSON, and dataclasses read back from it
signed               signatures with any kind of key, and DSSE envelopes
files                written whole and durably or not at all, and read with a limit
http                 a small HTTP server with a limit on everything
log                  the Merkle log's forms, and a log on disk
bounded_connections  how many connections anybody may open, and which one gives way

Imports nothing of sealring but its errors, its version and the native module; no torch.
"""
