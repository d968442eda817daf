"""Datasets of a vault: sealed shards, read in an order that depends on no world size.

fields               the fields of samples, with the same bytes on every CPU
shards               a dataset's index and digest; writes and reads a shard's file
formats              divides files to ingest into units of work and samples
stages, work         the work for one shard, and the process that does it
building             makes the next version of a dataset; goes on after a kill
on_ray               runs the work on a Ray cluster
order, reading, reading_keys, dataset   read samples in order, with the keys for this
gpu_loader           batches in that order, opened by a GPU
"""
