"""Causal attention of all sequences of a microbatch in one kernel call, on devices in bf16 and fp16.

    kernel                 devices                 windows  grouped heads  soft-cap  sinks
    flash-attn 3, else 2   CUDA, ROCm; installed   yes      yes            yes       no
    npu_fusion_attention   npu, of torch-npu       yes      yes            no        no
    torch's flash-attn     CUDA, ROCm, others *    yes      yes            no        yes

    * each backend that registers torch's operators `_flash_attention_forward` and `_flash_attention_backward`

Queries are the last tokens of their sequence's keys. No call waits for the device.

Shapes: T tokens laid end to end, H query heads, K key heads (H a multiple of K), D head size, S sequences.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)
LARGEST_HEAD = 256
LARGEST_HEAD_OF_SMALL_GPUS = 192
"""Largest head size with a backward pass in torch's kernel on GPUs of `SMALL_GPUS`."""
SMALL_GPUS = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with about 100 KiB of shared memory per block."""
HEAD_MULTIPLE = 8
HEAD_MULTIPLES = {"npu": 16}
"""Divisor of head sizes, by device type, where it is not `HEAD_MULTIPLE`."""
MASK_SIZE = 2048
"""Size of the mask that `npu_fusion_attention` takes for sequences of all lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences laid end to end in a tensor `[T, ...]`."""

    bounds: Tensor
    """First token of each sequence, and T: int32 `[S + 1]` on the tensor's device."""
    longest: int
    """Length of the longest sequence, on the host."""
    ends: tuple[int, ...]
    """Token after each sequence, on the host."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Sequences:
        """Copy the bounds to `device`, without waiting for it."""
        pinned = torch.accelerator.is_available()
        ends = tuple(accumulate(lengths))
        bounds = torch.tensor([0, *ends], dtype=torch.int32, pin_memory=pinned)
        return Sequences(bounds.to(device, non_blocking=True), max(lengths), ends)


class VarlenKernel(Protocol):
    """Attention of `[T, H, D]` queries to `[T, K, D]` keys and values of the same sequences; returns `[T, H, D]`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: Sequences,
        keys: Sequences,
        *,
        scale: float,
        window: int,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """`window` and `softcap`: see `AttentionOptions`.

        `sinks_H` adds one logit to the softmax denominator of each head (gpt-oss, arXiv:2508.10925).
        """
        ...


@lru_cache(maxsize=64)
def varlen_kernel(
    device: torch.device, dtype: torch.dtype, head_size: int, *, softcap: bool = False, sinks: bool = False
) -> VarlenKernel | None:
    """Kernel for tensors like these, by the larger head size of keys and values; None if no installed one fits."""
    if dtype not in DTYPES or head_size > LARGEST_HEAD:
        return None
    kernel = CHOICES.get(device.type, _elsewhere)(device, head_size, softcap, sinks)
    return None if kernel is None else partial(_padded, kernel, HEAD_MULTIPLES.get(device.type, HEAD_MULTIPLE))


def _on_cuda(device: torch.device, head_size: int, softcap: bool, sinks: bool) -> VarlenKernel | None:
    capability = torch.get_device_module(device).get_device_capability(device)
    if capability < AMPERE:
        return None
    function = _package()
    if function is not None and not sinks and (not softcap or "softcap" in inspect.signature(function).parameters):
        return partial(_by_package, function)
    has_torchs = torch.backends.cuda.is_flash_attention_available() and (
        head_size <= LARGEST_HEAD_OF_SMALL_GPUS or capability not in SMALL_GPUS
    )
    return _by_torch if has_torchs and not softcap else None


def _elsewhere(device: torch.device, head_size: int, softcap: bool, sinks: bool) -> VarlenKernel | None:
    return _by_torch if not softcap and _registered(device) else None


def _on_npu(device: torch.device, head_size: int, softcap: bool, sinks: bool) -> VarlenKernel | None:
    if softcap or sinks or importlib.util.find_spec("torch_npu") is None:
        return None
    return partial(_by_npu, importlib.import_module("torch_npu").npu_fusion_attention)


CHOICES = {"cuda": _on_cuda, "npu": _on_npu}
"""Choice of the kernel by torch's device type."""


def _package() -> Callable[..., Any] | None:
    """Function of flash-attn 3 or 2, whichever is installed."""
    for name in ("flash_attn_interface", "flash_attn"):
        if importlib.util.find_spec(name) is not None:
            function: Callable[..., Any] = importlib.import_module(name).flash_attn_varlen_func
            return function
    return None


def _registered(device: torch.device) -> bool:
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key)


def _padded(
    kernel: VarlenKernel, multiple: int, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any
) -> Tensor:
    """Call `kernel` with heads of one size, a multiple of `multiple`. Zeros do not change scores."""
    used = value.shape[-1]
    size = -(-max(query.shape[-1], used) // multiple) * multiple
    query, key, value = (
        tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
        for tensor in (query, key, value)
    )
    return kernel(query, key, value, *args, **named)[..., :used]


def _by_package(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequences,
    keys: Sequences,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    del sinks_H  # None: `varlen_kernel` selects another
    result = function(
        query,
        key,
        value,
        cu_seqlens_q=queries.bounds,
        cu_seqlens_k=keys.bounds,
        max_seqlen_q=queries.longest,
        max_seqlen_k=keys.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **({"softcap": softcap} if softcap else {}),
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _by_npu(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequences,
    keys: Sequences,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """torch-npu's kernel, which masks from the last token of each sequence: below the diagonal, or in a band."""
    del softcap, sinks_H  # 0 and None: `varlen_kernel` selects another
    band = {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0} if window else {"sparse_mode": 3}
    starts = (0, *queries.ends)
    filled = [(q, k) for start, q, k in zip(starts, queries.ends, keys.ends, strict=False) if q > start]
    out: Tensor = function(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_later_tokens(query.device),
        scale=scale,
        actual_seq_qlen=[q for q, _ in filled],
        actual_seq_kvlen=[k for _, k in filled],
        **band,
    )[0]
    return out


@lru_cache(maxsize=16)
def _later_tokens(device: torch.device) -> Tensor:
    """Mask that is True above the diagonal, of a fixed size."""
    with torch.inference_mode(False):  # backward passes keep it
        return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequences,
    keys: Sequences,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    del softcap  # 0: `varlen_kernel` selects another
    result: Tensor = _Flash.apply(query, key, value, sinks_H, queries, keys, scale, window)  # type: ignore[no-untyped-call]
    return result


class _Flash(torch.autograd.Function):
    """torch's flash-attn, without `varlen_attn`: a gradient through its logarithm of the denominator (LSE) is lost.

    With a sink s the denominator's logarithm is log(exp(LSE) + exp(s)). The kernel's backward pass recomputes weights
    from the LSE that it receives, and reads the output only for sum(dO · O), so both may include the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        queries: Sequences,
        keys: Sequences,
        scale: float,
        window: int,
    ) -> Tensor:
        ctx.sizes = queries.longest, keys.longest, 0.0, not window
        ctx.named = {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}
        out: Tensor
        out, lse_HT, *random_state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, queries.bounds, keys.bounds, *ctx.sizes, False, **ctx.named
        )
        if sinks_H is not None:
            out, lse_HT = with_sinks(out, lse_HT, sinks_H)
        ctx.save_for_backward(query, key, value, out, lse_HT, queries.bounds, keys.bounds, sinks_H, *random_state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse_HT, query_bounds, key_bounds, sinks_H, *random_state = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grads[0], query, key, value, out, lse_HT, query_bounds, key_bounds),
            *(*ctx.sizes, *random_state),
            **ctx.named,
        )
        d_sinks_H = None if sinks_H is None else sinks_gradient(grads[0], out, lse_HT, sinks_H)
        return dq, dk, dv, d_sinks_H, None, None, None, None


def with_sinks(out: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks to the softmax denominator of `[T, H, D]` outputs; returns new outputs and their LSE."""
    both_HT = torch.logaddexp(lse_HT, sinks_H.float()[:, None])
    shares_TH1: Tensor = (lse_HT - both_HT).exp().T[..., None]
    return (out * shares_TH1).to(out.dtype), both_HT


def sinks_gradient(grad: Tensor, out: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Gradient of `sinks_H`, from `[T, H, D]` outputs and their LSE, both with sinks."""
    shares_HT = (sinks_H.float()[:, None] - lse_HT).exp()
    gradient_H: Tensor = -(shares_HT * (grad.float() * out.float()).sum(-1).T).sum(1)
    return gradient_H.to(sinks_H.dtype)
