"""The cases that CI runs at every change: each operation and each kind of group once."""

from __future__ import annotations

SUBSET = frozenset(
    {
        "test_Backend_enum_class",
        "test_DistributedDataParallelCPU",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_all_gather",
        "test_all_gather_coalesced_simple",
        "test_all_gather_object_subgroup",
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_complex_unsupported_ops",
        "test_all_reduce_full_group_product",
        "test_all_reduce_group_max",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_cuda",
        "test_all_to_all_single_unequal_split",
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
        "test_batch_isend_irecv_gloo",
        "test_broadcast",
        "test_ddp_logging_data_cpu",
        "test_destroy_full_group",
        "test_gather",
        "test_gather_object",
        "test_get_backend",
        "test_get_future",
        "test_get_rank_size_group",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_wait_all_ranks",
        "test_new_subgroups_with_group_param",
        "test_reduce_sum",
        "test_scatter",
        "test_send_recv_any_source",
        "test_send_recv_with_tag",
        "test_sparse_all_reduce_sum",
        "test_static_graph_api_cpu",
    }
)
