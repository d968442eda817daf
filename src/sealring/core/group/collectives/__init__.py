"""torch's collectives, one file per idea; SealedProcessGroup is all of them together.

reducing      all_reduce, reduce, reduce_scatter
copying       broadcast, barrier, all_gather, gather, scatter
exchanging    all_to_all
coalescing    several at once
messaging     send and recv
shapes        whether a call's tensors fit together

torch's C++ calls these methods with the tensors and one options object; the stubs also list the
convenience forms that only exist for callers in Python, hence the ignored overrides. A method has
several names where torch renamed it between 2.11 and 2.15.
"""
