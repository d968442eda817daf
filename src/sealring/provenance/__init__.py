"""A log that cannot be rewritten unnoticed, and the signed statements that it holds.

In the order in which an entry travels:

notes        signed notes: text, keys and signatures (c2sp.org/signed-note)
tree         Merkle tree hashes and proofs (RFC 6962), without I/O
tiles        how a tree and its entries are cut into files (c2sp.org/tlog-tiles), without I/O
checkpoints  a log's signed size and root (c2sp.org/tlog-checkpoint)
folder       a log on disk, read and checked
writer       a log on disk, appended to
policy       which logs and witnesses to believe (c2sp.org/tlog-policy)
proofs       one text file that proves an entry (c2sp.org/tlog-proof)
submissions  what a log sends to a witness (c2sp.org/tlog-witness)
witnesses    asks witnesses, and believes none of them alone
envelopes    DSSE, signed with the key of a worker's certificate or with an owner's
digests      names with digests
intervals    what a worker did over an interval of steps
transformations  what an ingest, a stage, an export or an evaluation made
statements   both as in-toto statements, signed and checked
owners       keys of owners
broker_entries   what a broker's log says of workers
runs         the folder of a run: statements, log, evidence
replay       parts of a run, drawn at random, executed again

`sealring.witness` is the other end of `witnesses`.
Nothing here imports torch.
"""
