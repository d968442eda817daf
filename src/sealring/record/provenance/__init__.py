"""Signed statements about what a run did. A log (`sealring.formats.log`) holds them.

In the order in which an entry travels:

digests      names with digests
intervals    what a worker did over an interval of steps
transformations  what an ingest, a stage, an export or an evaluation made
statements   both as in-toto statements, signed and checked
owners       files of owners', logs' and witnesses' keys
runs         the folder of a run: statements, log, evidence
replay       parts of a run, drawn at random, executed again

Nothing here imports torch.
"""
