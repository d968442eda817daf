"""A log that cannot be rewritten unnoticed, in the order in which an entry travels.

notes        signed notes: text, keys and signatures (c2sp.org/signed-note)
tree         Merkle tree hashes and proofs (RFC 6962), and how a tree is cut into files
policy       which logs and witnesses to believe (c2sp.org/tlog-policy)
checkpoints  a log's signed size and root, proofs of entries, submissions to witnesses
folder       a log on disk, read, checked and appended to
witnesses    asks witnesses, and believes none of them alone
broker_entries  what a broker's log says of workers

record/witness is the other end of `witnesses`.
"""
