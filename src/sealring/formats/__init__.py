"""Forms that several rooms share: reading bytes from anywhere, and writing files.

strict               reads untrusted JSON, and makes dataclasses of it
signed               signatures with any kind of key, and DSSE envelopes
files                writes files whole and durably or not at all, and reads them with a limit
http                 a small HTTP server with a limit on everything
log                  the Merkle log's forms, and a log on disk
bounded_connections  how many connections clients may open, and which one is closed first

Imports only sealring's errors, its version and the native module; never torch.
"""
