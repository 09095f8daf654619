"""Layers that ranks share by outputs (`column`) or inputs (`row`), norms, and many layers in one."""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.module import collectives
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def root_mean_square(inputs, weight, eps, zero_centered_gamma):
    """In float32."""
    x = inputs.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * (weight.float() + zero_centered_gamma)).to(inputs.dtype)


def new(init_method, dtype, device, *shape):
    found = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype, device=device))
    init_method(found)
    return found


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        *,
        eps,
        sequence_parallel,
        params_dtype,
        zero_centered_gamma,
        device,
        normalized_shape=None,
        hidden_size=None,  # its name in megatron-core 0.16
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = new(lambda weight: None, params_dtype, device, normalized_shape or hidden_size)
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, inputs):
        return root_mean_square(inputs, self.weight, self.eps, self.zero_centered_gamma)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        *,
        in_features,
        out_features,
        sequence_parallel,
        fuse_wgrad_accumulation,
        tp_group,
        tp_size,
        get_rng_state_tracker,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        device,
        rng_tracker_name=None,
    ):
        assert not fuse_wgrad_accumulation
        assert not return_bias
        assert parallel_mode in (None, "column", "row")
        super().__init__()
        self.share(tp_group, tp_size, sequence_parallel)
        self.parallel_mode = parallel_mode if self.tp_size > 1 else None
        self.use_bias = bias
        if parallel_mode == "column":
            out_features //= self.tp_size
        elif parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        self.weight = new(init_method, params_dtype, device, out_features, in_features)
        if bias:
            assert parallel_mode != "row"
            self.bias = new(init_method, params_dtype, device, out_features)

    def forward(self, inputs, is_first_microbatch=None):
        return self.shared(inputs)

    def shared(self, inputs):
        if self.parallel_mode == "column":
            into = collectives.gather if self.sequence_parallel else collectives.copy
            inputs = into(inputs, self.tp_group)
        found = F.linear(inputs, self.weight, self.bias if self.use_bias else None)
        if self.parallel_mode == "row":
            out = collectives.reduce_scatter if self.sequence_parallel else collectives.reduce
            found = out(found, self.tp_group)
        return found


class LayerNormLinear(Linear):
    def __init__(self, *, eps, normalization, zero_centered_gamma, return_layernorm_output, **options):
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        super().__init__(**options)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = new(
            lambda weight: None, options["params_dtype"], options["device"], options["in_features"]
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inputs, is_first_microbatch=None):
        return self.shared(root_mean_square(inputs, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


class LayerNormMLP(torch.nn.Module):
    """Nothing is one; peft asks whether anything is."""


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        *,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel,
        fuse_wgrad_accumulation,
        tp_group,
        tp_size,
        get_rng_state_tracker,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        device,
        rng_tracker_name,
        ub_name,
    ):
        assert not fuse_wgrad_accumulation
        assert not bias
        assert tp_group is None or tp_group.size() == 1  # who hands it tokens also sends them
        super().__init__()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            weight = new(init_method, params_dtype, device, out_features, in_features)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, inputs, m_splits, is_first_microbatch=None):
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        parts = torch.split(inputs, m_splits)
        weights = (self.get_parameter(f"weight{number}") for number in range(self.num_gemms))
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
