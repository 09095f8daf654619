"""`strategy_config` with which SGLang runs where it has no kernels: plain torch, step by step."""

from __future__ import annotations

ON_A_CPU = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "max_running_requests": 64,
    "mem_fraction_static": 0.3,
}
