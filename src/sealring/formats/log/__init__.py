"""A log that cannot be rewritten unnoticed. The modules, in the order in which an entry travels:

notes        signed notes: text, keys and signatures (c2sp.org/signed-note)
tree         Merkle tree hashes and proofs (RFC 6962), and how a tree is cut into files
policy       which logs and witnesses to trust (c2sp.org/tlog-policy)
checkpoints  a log's signed size and root, proofs of entries, submissions to witnesses
folder       a log on disk: read, checked and appended to
witnesses    asks witnesses for cosignatures, and trusts no single one
broker_entries  what a broker's log says about workers

The server that `witnesses` talks to is record/witness.
"""
