"""Engine arguments (`ServerArgs`) of the supported SGLang versions.

Listed here so that `roll-core check` works without SGLang, which takes long to import and may be installed only where
the role runs. A test and every server start compare them with the arguments of the installed SGLang.
"""

from __future__ import annotations

_REASONS: dict[str, str] = {
    "is set by the role's model_args": """
        model_path tokenizer_path tokenizer_mode skip_tokenizer_init trust_remote_code revision json_model_override_args
        dtype served_model_name model_config_parser decrypted_config_file decrypted_draft_config_file download_dir
        model_checksum
    """,
    "is different at each start": "random_seed",
    "is set by the role's generating_args": """
        sampling_defaults preferred_sampling_params
    """,
    "is fixed for roles that generate": """
        is_embedding encoder_only language_only language_model_only
    """,
    "is set by this plugin": """
        custom_weight_loader enable_custom_logit_processor sampling_backend weight_version
    """,
    "is set by this plugin, so that images are those that the trainer sees": """
        enable_multimodal enable_precise_embedding_interpolation image_processor_backend disable_fast_image_processor
        mm_process_config mm_processor_worker_num mm_io_worker_num trust_mm_content_hashes mm_preprocess_cache_size_mb
        keep_mm_feature_on_device mm_feature_transport allowed_media_domains media_url_max_file_size_mb
    """,
    "is not supported: features of images would be those of older weights": """
        enable_mm_global_cache mm_global_cache_backend
    """,
    "is fixed by the definition of a request's priority": """
        schedule_low_priority_values_first disable_priority_preemption default_priority_value
        priority_scheduling_preemption_threshold abort_on_priority_when_disabled
    """,
    "is fixed by the definition of a completion's logprobs": """
        enable_deterministic_inference rl_on_policy_target enable_watermark watermark_config watermark_context_window
        watermark_default_enabled watermark_enforce_all watermark_key watermark_key_b watermark_max_probability
        watermark_mixing_probability
    """,
    "would truncate prompts silently": "allow_auto_truncate",
    "returns values that a completion does not contain": """
        enable_return_hidden_states return_hidden_states_mode enable_return_indexer_topk
        sampling_mask_max_tokens return_input_ids return_output_ids aux_hidden_state_capture
        enable_return_aux_hidden_states return_aux_hidden_state_layer_ids
    """,
    "is set by the run's router_replay": "enable_return_routed_experts",
    "is code, which a config cannot contain": """
        stat_loggers custom_sigquit_handler
    """,
    "is part of the connection between this plugin and the server": """
        port api_key admin_api_key fastapi_root_path skip_server_warmup warmups tokenizer_worker_num
        detokenizer_worker_num smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args enable_http2
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh stream_interval
        incremental_streaming_output enable_http_worker_reuseport grpc_response_timeout_secs
    """,
    "is set by the platform": """
        device base_gpu_id gpu_id_step mlx_enable_sampling use_ray numa_node
    """,
    "is set by device_mapping: each replica is a worker": """
        dp_size load_balance_method nnodes node_rank dist_init_addr nccl_port gated_launch_port enable_dp_attention
        enable_dp_attention_local_control_broadcast enable_dp_lm_head attn_dp_size
    """,
    "is not supported yet; tp_size is": """
        pp_size pp_max_micro_batch_size pp_async_batch_depth dcp_size dcp_comm_backend dcp_replicate_q_proj attn_cp_size
        moe_dp_size dwdp_size enable_prefill_cp cp_strategy enable_cp_decode_attn_tp ep_join_mode ep_join_rank_offset
        elastic_ep_backend elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout elastic_ep_rejoin
        enable_elastic_expert_backup enable_cp_tp_group_sharing shared_experts_tp_size
    """,
    "is not supported: SGLang quantizes weights itself, so loaded weights could not be compared with the sent weights;"
    " strategy vllm loads fp8 weights that the trainer has quantized (quantization: fp8)": "quantization",
    "is not supported yet: loaded weights could not be compared with the sent weights": """
        quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile weight_cache_mode
        weight_cache_socket weight_cache_timeout startup_weight_load_mode delete_ckpt_after_loading
        checkpoint_engine_wait_weights_before_ready cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode enable_amd_monokernel enable_nvidia_megakernel
    """,
    "is not supported: copied, moved or offloaded experts could not be compared with the sent weights": """
        enable_eplb ep_num_redundant_experts ep_dispatch_algorithm init_expert_location eplb_algorithm
        eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
        enable_waterfill kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
        kt_threadpool_count kt_weight_path enable_paged_experts paged_experts_num_resident
    """,
    "is set by this plugin: shared experts are loaded and compared as layers of their own": """
        disable_shared_experts_fusion enforce_shared_experts_fusion
    """,
    "is not supported yet: a draft model would keep its old weights": """
        speculative_algorithm uno_lora_path speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map
        speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_moe_runner_backend
        speculative_moe_a2a_backend speculative_draft_model_quantization speculative_skip_dp_mlp_sync
        enable_draft_weights_cpu_backup enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config
        spec_trace_dir
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
        speculative_boundary_reduction speculative_draft_sink_size speculative_enable_w4a4_mxfp4_megamoe
        speculative_use_block_verification
    """,
    "is set by the trained adapter": """
        max_lora_rank lora_target_modules lora_paths max_loaded_loras max_loras_per_batch lora_eviction_policy
        enable_lora_overlap_loading lora_strict_loading lora_drain_wait_threshold
    """,
    "is not supported with a trained adapter": """
        experts_shared_outer_loras lora_use_virtual_experts
    """,
    "is set by sleep_level": """
        enable_memory_saver enable_weights_cpu_backup
    """,
    "is not supported yet: prefill and decoding share the engine's processes": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path
        sm_group_num dllm_algorithm dllm_algorithm_config dllm_fdfo enable_pd_role_switch
        disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold
        disaggregation_enable_kv_checksum
    """,
}
REJECTED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that `strategy_config` rejects, each with the reason that follows its name in the error message."""

_PASSED_ON = """
    asr_max_buffer_seconds asr_max_concurrent_sessions batch_notify_size bf16_gemm_backend boundary_reduction
    bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token c128_page_size chat_template
    completion_template constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    constrained_json_whitespace_pattern crash_dump_folder cuda_graph_backend_decode cuda_graph_backend_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context cuda_graph_tc_compiler debug_cuda_graph
    debug_tensor_dump_input_file debug_tensor_dump_layers debug_tensor_dump_output_folder decode_attention_backend
    decode_log_interval deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode
    default_chat_template_kwargs disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
    disable_attn_tp_gather disable_chunked_prefix_cache disable_cuda_graph_padding disable_custom_all_reduce
    disable_decode_cuda_graph disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather
    disable_hybrid_swa_memory disable_outlines_disk_cache disable_overlap_schedule disable_prefill_cuda_graph
    disable_tokenizer_batch_decode dist_timeout dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend
    dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_aiter_allreduce_fusion enable_attn_tp_input_scattered
    enable_broadcast_mm_inputs_process enable_cache_report enable_cudagraph_gc enable_decoder_swa_bounded_replay
    enable_deepseek_v4_fp4_indexer enable_dense_mlp_attn_tp enable_dsa_cache_layer_split enable_dsa_fused_indexer
    enable_dynamic_batch_tokenizer enable_dynamic_chunking enable_encoder_swa_bounded_replay
    enable_flashinfer_allreduce_fusion enable_flexkv enable_forward_pass_metrics enable_fp32_lm_head
    enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_hierarchical_cache enable_hisparse
    enable_int8_mamba_checkpoint enable_kv_cache_sharding enable_layernorm_sp enable_layerwise_nvtx_marker
    enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec enable_linker_mla_dedup enable_lmcache
    enable_mamba_cache_stochastic_rounding enable_megamoe_for_layernorm_sp enable_metrics
    enable_metrics_for_all_schedulers enable_mfu_metrics enable_mis enable_mixed_chunk enable_mscclpp enable_nccl_nvls
    enable_p2p_check enable_page_major_kv_layout enable_prefill_delayer enable_prefix_mm_cache enable_profile_cuda_graph
    enable_quant_communications enable_request_time_stats_logging enable_response_store enable_scattered_sconv
    enable_session_radix_cache enable_shared_experts_attn_tp enable_single_batch_overlap enable_streaming_session
    enable_strict_thinking enable_symm_mem enable_tf32_matmul enable_tokenizer_batch_encode enable_torch_compile
    enable_torch_compile_debug_mode enable_torch_symm_mem enable_tp_lm_head_all_to_all enable_trace
    enable_two_batch_overlap enable_unified_cache_external_linker enable_unified_memory enable_w4a4_mxfp4_megamoe
    enforce_disable_flashinfer_allreduce_fusion engine_info_bootstrap_port expert_balancedness_report_mode
    expert_distribution_recorder_buffer_size expert_distribution_recorder_mode export_metrics_to_file
    export_metrics_to_file_dir extra_metric_labels file_storage_path flashinfer_a2a_dispatch_type
    flashinfer_allreduce_fusion_backend flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged
    flashinfer_mxfp4_moe_precision flexkv_config_file forward_hooks forward_pass_metrics_ipc_name
    forward_pass_metrics_worker_id fp4_gemm_runner_backend fp8_gemm_runner_backend fuseep_mode gc_threshold
    gc_warning_threshold_secs generation_tokens_buckets grammar_backend hf_chat_template_name
    hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout hicache_ratio
    hicache_size hicache_storage_backend hicache_storage_backend_extra_config hicache_storage_prefetch_policy
    hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval hicache_write_policy
    hisparse_config http2_initial_connection_window_size http2_max_concurrent_streams int8_mamba_ckpt_size
    kv_cache_dtype kv_canary kv_canary_real_data kv_canary_sweep_interval kv_events_config limit_mm_data_per_request
    linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    linear_replayssm_cache_len lmcache_config_file load_publish_endpoint load_snapshot_publish_interval log_level
    log_level_http log_requests log_requests_format log_requests_level log_requests_target lora_backend mamba_backend
    mamba_cache_philox_rounds mamba_full_memory_ratio mamba_max_states_per_path mamba_radix_cache_strategy
    mamba_ssm_dtype mamba_track_interval max_lora_chunk_size max_mamba_cache_size max_prefill_tokens max_queued_requests
    min_free_slots_delay mm_attention_backend mm_enable_dp_encoder model_impl model_loader_extra_config
    modelexpress_config moe_a2a_backend moe_dense_tp_size mooncake_ib_device msprobe_dump_config
    num_continuous_decode_steps otlp_service_name otlp_traces_endpoint ple_offload_backend ple_offload_dir
    ple_offload_embedding pre_warm_nccl prefill_attention_backend prefill_decode_interval prefill_decode_interval_min_bs
    prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes
    prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
    prefill_kv_cache_dequant_dtype prefill_max_requests prefill_only_disable_kv_cache prompt_tokens_buckets
    qsa_indexer_dtype radix_cache_backend radix_eviction_policy radix_eviction_policy_config reasoning_parser
    remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_start_seed_via_transfer_engine retraction_policy schedule_conservativeness
    scheduler_recv_interval show_time_cost sleep_on_idle smg_http_sidecar_port soft_watchdog_timeout
    stream_response_default_include_usage strip_thinking_cache swa_full_tokens_ratio swa_prefix_tails
    tbo_token_distribution_threshold tokenizer_backend tokenizer_metrics_allowed_custom_labels
    tokenizer_metrics_custom_labels_header tool_call_parser tool_server torch_compile_max_bs trace_modules
    triton_attention_num_kv_splits triton_attention_reduce_in_fp32 triton_attention_split_tile_size
    trust_request_chat_template unified_cache_external_linker_backend unified_cache_external_linker_config
    uses_mamba_radix_cache uvicorn_access_log_exclude_prefixes watchdog_timeout weight_loader_disable_mmap
    weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
"""
PASSED_ON: tuple[str, ...] = tuple(_PASSED_ON.split())
"""Arguments passed to SGLang unchanged, which SGLang validates."""
