"""Signed statements about what a run did. A log (`sealring.formats.log`) holds them.

forms       the content of statements
signing     how statements are signed and checked; files of keys
run_folder  the folder of a run: statements, log, evidence

Nothing here imports torch.
"""
