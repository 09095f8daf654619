"""Models and arrangements that Megatron can divide, and others that it cannot: for `check`, and for Megatron itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Division:
    model_type: str
    keys: dict
    """Of the model."""
    config: dict
    ranks: int = 2
    fits: bool = False


TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WHOLE_EXPERTS = TENSOR | {"expert_tensor_parallel_size": 1}
DIVISIONS = {
    "layers": Division(model_type="qwen3", keys={"num_hidden_layers": 3}, config={"pipeline_model_parallel_size": 2}),
    "heads": Division(model_type="qwen3", keys={"num_attention_heads": 3, "num_key_value_heads": 1}, config=TENSOR),
    "key and value heads": Division(model_type="qwen3", keys={"num_key_value_heads": 1}, config=TENSOR),
    "dense": Division(model_type="qwen3", keys={"intermediate_size": 31}, config=TENSOR),
    "no experts to distribute": Division(model_type="qwen3", keys={}, config={"expert_model_parallel_size": 2}),
    "vocabulary": Division(
        model_type="qwen3",
        # It has 61 tokens, which are padded.
        keys={"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 33},
        config=TENSOR | {"tensor_model_parallel_size": 3},
        ranks=3,
        fits=True,
    ),
    "mixtral, number of experts": Division(
        model_type="mixtral", keys={"num_local_experts": 4}, config={"expert_model_parallel_size": 3}, ranks=3
    ),
    "mixtral, split experts": Division(model_type="mixtral", keys={"intermediate_size": 31}, config=TENSOR),
    "mixtral, experts split alone": Division(
        model_type="mixtral", keys={"intermediate_size": 31}, config={"expert_tensor_parallel_size": 2}
    ),
    "mixtral, whole experts": Division(
        model_type="mixtral", keys={"intermediate_size": 31}, config=WHOLE_EXPERTS, fits=True
    ),
    "qwen3_moe, split experts": Division(model_type="qwen3_moe", keys={"moe_intermediate_size": 15}, config=TENSOR),
    "qwen3_moe, whole experts": Division(
        model_type="qwen3_moe", keys={"moe_intermediate_size": 15}, config=WHOLE_EXPERTS, fits=True
    ),
    "qwen3_moe, no dense layers": Division(
        model_type="qwen3_moe", keys={"intermediate_size": 31}, config=TENSOR, fits=True
    ),
    "qwen3_moe, dense layers between": Division(
        model_type="qwen3_moe", keys={"intermediate_size": 31, "mlp_only_layers": [0]}, config=TENSOR
    ),
    "deepseek_v3, dense": Division(
        model_type="deepseek_v3", keys={"intermediate_size": 31, "first_k_dense_replace": 1}, config=TENSOR
    ),
    "deepseek_v3, no dense layers": Division(
        model_type="deepseek_v3",
        keys={"intermediate_size": 31, "first_k_dense_replace": 0},
        config=TENSOR,
        fits=True,
    ),
    "deepseek_v3, shared experts": Division(
        model_type="deepseek_v3", keys={"moe_intermediate_size": 15, "n_shared_experts": 3}, config=WHOLE_EXPERTS
    ),
    "deepseek_v3, shared experts that are one": Division(
        model_type="deepseek_v3",
        keys={"moe_intermediate_size": 15, "n_shared_experts": 2},
        config=WHOLE_EXPERTS,
        fits=True,
    ),
    "recomputed layers": Division(
        model_type="qwen3",
        keys={"num_hidden_layers": 4},
        config={"recompute_granularity": "full", "recompute_num_layers": 3},
        ranks=1,
    ),
    "recomputed pairs of layers": Division(
        model_type="qwen3",
        keys={"num_hidden_layers": 4},
        config={"recompute_granularity": "full", "recompute_num_layers": 2},
        ranks=1,
        fits=True,
    ),
    "first layers recomputed": Division(
        model_type="qwen3",
        keys={"num_hidden_layers": 4},
        config={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ranks=1,
        fits=True,
    ),
}
