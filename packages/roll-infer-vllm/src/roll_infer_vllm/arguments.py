"""Engine arguments of the supported vLLM versions.

Listed here so that `roll-core check` works without vLLM, which takes seconds to import and may be installed only where
the role runs. A test and every engine start compare them with the arguments of the installed vLLM. `versions` has the
names that not all versions have.
"""

from __future__ import annotations

QUANTIZATION = {"fp8": "roll_fp8", "fp8_per_block": "roll_fp8_per_block"}
"""Names in vLLM's registry of our quantization methods, by `quantization`."""
_REASONS: dict[str, str] = {
    "is set by the role's model_args": """
        model model_weights tokenizer tokenizer_mode hf_config_path served_model_name revision code_revision
        tokenizer_revision hf_overrides dtype trust_remote_code skip_tokenizer_init config_format
    """,
    "is different at each start": "seed",
    "is set by the role's generating_args": "generation_config override_generation_config",
    "is fixed for roles that generate": "runner convert",
    "is set by this plugin": """
        worker_cls worker_extension_cls scheduler_cls weight_transfer_config
    """,
    "is fixed by the definition of a completion's logprobs": "logprobs_mode max_logprobs",
    "is set by the run's router_replay": "enable_return_routed_experts",
    "returns values that a completion does not contain": "return_sampling_mask",
    "is always on, because the run's metrics come from it": "disable_log_stats aggregate_engine_logging",
    "is set by device_mapping: each replica is a worker": """
        data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
        data_parallel_size_local data_parallel_start_rank nnodes node_rank master_addr master_port device_ids
        distributed_executor_backend
    """,
    "is not supported yet; tensor_parallel_size and pipeline_parallel_size are": """
        prefill_context_parallel_size decode_context_parallel_size
    """,
    "is set by the trained adapter": """
        lora_dtype lora_target_modules max_cpu_loras max_lora_rank max_loras
    """,
    "is not supported with a trained adapter": """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras max_lora_cls_labels specialize_active_lora
    """,
    "is not supported: loaded weights could not be compared with the sent weights; quantization is": """
        quantization_config allow_deprecated_quantization
    """,
    "is not supported: logprobs of drafted tokens have another meaning": """
        speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics
    """,
    "is not supported: prompt logprobs would be wrong": "kv_sharing_fast_prefill",
    "is not supported: the trainer reads every token of a video": "video_pruning_method video_pruning_rate",
    "is not supported: redundant copies of experts could not be compared with the sent experts": """
        enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size
    """,
    "is set by sleep_level": "enable_sleep_mode",
    "is not needed: a weight update follows each sleep": "sleep_preserve_parameter_names",
    "is set by the model's processor, which the trainer uses as well": "mm_processor_kwargs mm_device_do_normalize",
    "is set to 0: a weight update would clear the cache under running requests": """
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
    """,
}
REJECTED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that `strategy_config` rejects, each with the reason that follows its name in the error message."""

_PASSED_ON = """
    additional_config all2all_backend allowed_local_media_path allowed_media_domains async_scheduling attention_backend
    attention_config aux_output_config collect_detailed_traces compilation_config cp_kv_cache_interleave_size
    cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes cudagraph_metrics
    custom_histogram_buckets dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
    dcp_kv_cache_interleave_size dcp_q_replicate diffusion_config disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization disable_sliding_window
    distributed_timeout_seconds download_dir dp_sync_interval ec_manager_config ec_transfer_config
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_ep_weight_filter enable_fault_tolerance
    enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_mfu_metrics enable_mm_embeds enable_mm_processor_stats enable_nccl_comm_suspend enable_prompt_embeds
    enable_shm_tensor_arena enable_trace_replay engram_config expert_placement_strategy
    fail_on_environ_validation fault_tolerance_config gdn_prefill_backend hf_token ignore_patterns interleave_mm_strings
    io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend
    kernel_config kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample kv_events_config
    kv_offloading_backend kv_offloading_size kv_transfer_config language_model_only limit_mm_per_prompt linear_backend
    log_config_file log_level logging_config logits_processors long_prefill_token_threshold
    long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cudagraph_capture_size
    max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_parallel_loading_workers
    media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
    mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_device mm_tensor_ipc model_class_overrides model_impl
    model_loader_extra_config moe_backend monokernel num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes
    offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
    otlp_traces_endpoint performance_mode pooler_config prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location ray_workers_use_nsight
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling sleep_mode_backend
    sleep_mode_offload_cudagraph sparse_indexer_topk_backend stream_interval structured_outputs_config
    swa_bounded_replay tokens_only ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
    watchdog_config watermark watermark_config
"""
PASSED_ON: tuple[str, ...] = tuple(_PASSED_ON.split())
"""Arguments passed to the engine unchanged, in addition to the fields of `VllmConfig`."""
