"""Sealed-only mode: no process group of this process, or of its children, is in plaintext.

setting    whether it is on, in this process or in one above it
guard      turns it on, for this process and those started from here
groups     every group that torch makes is ours, or is refused
doors      other ways of torch and of frameworks to reach a peer are refused
caller     the line of the user's code that a refusal names

It guards against mistakes: a framework that makes a group of Gloo's behind a sealed one, a script
that names no backend. Hostile code inside a worker can undo it, as it can send its data anywhere.
"""
