"""Experts of other ranks, in SGLang's own computation of experts in torch.

With expert parallelism, SGLang marks a choice of an expert of another rank by -1. Its kernels skip those; its
computation in torch, which a CPU without AMX runs, would index with it. Here such a choice becomes the first expert
with weight 0.
"""

from __future__ import annotations

from standin import change


def skip_experts_of_other_ranks():
    """In this process, from now on."""
    change("sglang.srt.layers.moe.fused_moe_native", _skip)


def _skip(module):
    forward = module.moe_forward_native

    def forward_local(layer, x, topk_output, config):
        ids, weights = topk_output.topk_ids, topk_output.topk_weights * (topk_output.topk_ids >= 0)
        if layer.moe_ep_size == 1:
            return forward(layer, x, topk_output, config)
        choices = zip(ids.clamp(min=0).split(1, dim=1), weights.split(1, dim=1), strict=True)  # a token's are different
        return sum(
            forward(layer, x, topk_output._replace(topk_ids=expert, topk_weights=weight), config)
            for expert, weight in choices
        )

    module.moe_forward_native = forward_local
