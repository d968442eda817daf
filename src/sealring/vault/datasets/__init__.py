"""Datasets of a vault: sealed shards, read in an order that depends on no world size.

fields, index        what samples consist of; what a dataset is, and its digest
shards               a shard's file, written and read
sources, formats, parquet_source   files to ingest, as units of work and as samples
work, running        what is done for one shard; by which process
building, ingest     shards into the next version of a dataset, resumed after a kill
stages, pipeline, on_ray   datasets made from datasets, on this machine or on Ray
order, reading, rows, reading_keys, dataset, loader   samples in their order, and the keys for it
gpu_loader           batches in that order, opened by a GPU
"""
