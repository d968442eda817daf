"""torch's collectives, one file for each kind. SealedProcessGroup inherits all of them.

reducing      all_reduce, reduce, reduce_scatter
copying       broadcast, barrier, all_gather, gather, scatter
exchanging    all_to_all
coalescing    several collectives in one call
messaging     send and recv
shapes        checks that a call's tensors fit together

torch's C++ calls these methods with the tensors and one options object. Torch's type stubs also
list forms that exist only for callers in Python, hence the ignored overrides. A method that torch
renamed between 2.11 and 2.15 has the name that the installed torch uses.
"""
