"""Engine options that change speed and memory use, not answers."""

SPEED_OPTIONS = (
    *("async_scheduling", "block_size", "compilation_config", "cpu_offload_gb"),
    *("device_map", "disable_log_stats", "distributed_executor_backend", "download_dir"),
    *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "give_up_s"),
    *("gpu_memory_utilization", "hf_token", "kv_cache_memory_bytes", "kv_offloading_size"),
    "long_prefill_token_threshold",
    *("max_cudagraph_capture_size", "max_num_batched_tokens", "max_num_seqs"),
    *("max_parallel_loading_workers", "mm_processor_cache_gb", "mm_processor_cache_type"),
    *("mm_shm_cache_max_object_size_mb", "num_gpu_blocks_override", "performance_mode"),
    *("pipeline_parallel_size", "renderer_num_workers", "scheduler_reserve_full_isl"),
    *("shrink_on_oom", "skip_mm_profiling", "stream_interval", "swap_space"),
    *("tensor_parallel_size", "use_tqdm_on_load", "watermark", "worker_cls"),
)
"""A run may be resumed with other values of these options. Without ``--allow-changes``, ``tune`` tries only these
options."""
