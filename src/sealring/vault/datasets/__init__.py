"""Datasets of a vault: sealed shards, read in an order that depends on no world size.

fields               what samples consist of, with the same bytes on every CPU
shards               what a dataset is, and its digest; a shard's file, written and read
formats              files to ingest, as units of work and as samples
stages, work         what is done for one shard; by which process
building             files or datasets into the next version of a dataset, resumed after a kill
on_ray               the same on Ray
order, reading, reading_keys, dataset   samples in their order, and the keys for it
gpu_loader           batches in that order, opened by a GPU
"""
