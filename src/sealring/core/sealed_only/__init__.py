"""Sealed-only mode: no process group of this process, or of its children, is in plaintext.

setting    whether it is on
guard      turns it on
groups     every group that torch makes is ours, or is refused
classes    torch's other ways to reach a peer are refused when they are constructed
children   processes started from here are in this mode too
mark       how a process tells that one above it is in this mode

It guards against mistakes: a framework that makes a group of Gloo's behind a sealed one, a script
that names no backend. Hostile code inside a worker can undo it, as it can send its data anywhere.
"""
