"""A witness of transparency logs (c2sp.org/tlog-witness).

state    what it has cosigned, and whether it may cosign more; on the disk before it answers
server   the protocol over HTTP

Its HTTP server is the broker's, so it needs the extra `broker`.
"""
