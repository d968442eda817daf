"""Constant time: no branch and no address depends on a key or on a message.

`make constant-time` runs all of it: the CPU's compilation of the GPU's cipher under valgrind, and
the GPU's own code in an emulator that follows secrets from instruction to instruction.
"""
