"""Names of Transformer Engine's parameters, mapped to those of Megatron's own layers.

Rules and checkpoints use only the names of Megatron's own layers.

    fused norm and linear      mlp.linear_fc1.layer_norm_weight  ->  pre_mlp_layernorm.weight
    grouped local experts      mlp.experts.linear_fc1.weight3    ->  mlp.experts.local_experts.3.linear_fc1.weight
"""

from __future__ import annotations

import re

ENGINE = tuple(
    (re.compile(rf"(decoder\.layers\.\d+\.){theirs}"), rf"\g<1>{ours}")
    for theirs, ours in (
        (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
        (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attention.\g<2>_layernorm.weight"),
        (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", r"mlp.experts.local_experts.\g<3>.\g<2>.weight"),
    )
)


def own_name(name: str) -> str:
    """The name in Megatron's own layers; other names are returned unchanged."""
    for pattern, ours in ENGINE:
        found = pattern.fullmatch(name)
        if found is not None:
            return found.expand(ours)
    return name
