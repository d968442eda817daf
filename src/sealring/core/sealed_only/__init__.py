"""Sealed-only mode: no process group of this process, or of its children, is in plaintext.

setting    whether the mode is on, in this process or in one above it
guard      turns the mode on, for this process and those that it starts
groups     makes sealring serve every group that torch makes, or refuses the group
doors      refuses other ways of torch and of frameworks to reach a peer

The mode protects against mistakes: a framework that makes a Gloo group beside a sealed one, a
script that names no backend. It does not protect against hostile code inside a worker, which can
undo it and can send its data anywhere.
"""
