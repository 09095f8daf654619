"""Causal attention over sequences laid end to end, without padding, as an attention function of transformers.

    tokens   a a a a b b c c c          a query sees its own sequence up to itself,
    segments 0 0 0 0 1 1 2 2 2          and not further back than the layer's window

Shapes: T flat tokens, H query heads, K key/value heads (H a multiple of K), D head size, L length of one sequence or
block of queries, S keys that a block sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from roll_core.errors import UnsupportedError
from roll_modeling.kernels import blocked_attention
from roll_modeling.model_table import FLAT_ATTENTION
from roll_modeling.varlen_attention import Sequences, varlen_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


NAME = FLAT_ATTENTION
"""Name of this attention in transformers."""
MIN_BLOCK = 512
"""Minimum queries of a block with a window; smaller blocks would be many small products."""
WITHOUT_EFFECT = frozenset({"position_ids", "output_attentions", "use_cache", "cache_position"})
"""Further arguments of layers, which attention in transformers does not read either."""


class SharedAttention(Protocol):
    """Attention over tokens that several ranks share, such as `context_parallel.ContextParallel`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
        """Same as `flat_attention`, for this rank's share of the tokens."""
        ...


@dataclass(eq=False)
class FlatLayout:
    """Lengths of the sequences in one forward pass; passed to every layer as `roll_layout`."""

    lengths: tuple[int, ...]
    context: SharedAttention | None = None
    """Attention across the ranks that share the tokens; None on one rank."""
    blocks: tuple[Tensor | None, ...] = ()
    """For each sequence with images int64 `[L]`: block of each token, -1 for none; None for the other sequences. Empty
    without blocks. Tokens of a block attend to each other in both directions, as far as the window reaches."""
    num_calls: int = field(default=0)
    """Number of attention layers that have run. Layers that mix tokens in other ways are not counted."""
    _sequences: Sequences | None = field(default=None, init=False, repr=False)

    def sequences(self, device: torch.device) -> Sequences:
        """The sequences' bounds on `device`. All layers of a pass share them."""
        if self._sequences is None or self._sequences.bounds.device != device:
            self._sequences = Sequences.of(self.lengths, device)
        return self._sequences


def register() -> None:
    """Register the attention with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface().valid_keys():
        AttentionInterface.register(NAME, flat_attention)
    AttentionMaskInterface.register(NAME, flat_mask)


def register_untraced() -> None:
    """Keep `torch.compile` from tracing the attention, for all models of this process.

    A trace would hold for the sequence lengths of one microbatch only.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(flat_attention))  # type: ignore[no-untyped-call]


def flat_mask(
    *,
    q_length: int,
    config: Any,
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_unused: object,
) -> Tensor:
    """Replace the attention mask by the layers' window: `[1, 1, 1, 1]`; 0 for no window.

    It is on the host for every `device`, so that layers read it without waiting for the device.

    Raises `UnsupportedError` for masks other than causal ones, with or without a window.
    """
    del q_length, device
    chunk = getattr(config, "attention_chunk_size", None)
    if use_vmap or (local_size is not None and local_size == chunk):
        raise UnsupportedError("this architecture's attention mask is neither causal nor a causal window")
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64, device="cpu")


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    roll_layout: FlatLayout | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers: `[1, H, T, D]` queries, `[1, K, T, D]` keys and values to `[1, T, H, D]`.

    `s_aux`, `[H]`, are attention sinks. Raises `UnsupportedError` for padded inputs, a cache, dropout, and arguments
    that are not known, such as the keys to which a sparse attention is limited.
    """
    del module
    if roll_layout is None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnsupportedError("flat attention needs a layout of flat tokens, and no cache")
    if dropout:
        raise UnsupportedError("flat attention has no dropout")
    if is_causal is False:
        raise UnsupportedError("flat attention is causal")
    for name, option in others.items():
        if option is not None and name not in WITHOUT_EFFECT:
            raise UnsupportedError(f"flat attention has no argument {name}")
    roll_layout.num_calls += 1
    window = int(attention_mask) if attention_mask is not None else 0
    how = AttentionOptions(
        layout=roll_layout,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window or sliding_window or 0,
        softcap=softcap or 0.0,
        sinks_H=s_aux,
    )
    context = roll_layout.context
    return (attend_flat if context is None else context.attend)(query, key, value, how), None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Parameters of a layer's attention, apart from its queries, keys and values."""

    layout: FlatLayout
    """Sequences over all ranks."""
    scale: float
    window: int
    """Number of keys that a query sees, its own included; 0 for all keys up to its own."""
    softcap: float
    """Bound of the logit soft-cap: scores lie within ± this value; 0 disables it."""
    sinks_H: Tensor | None = None
    """A logit per query head that only adds to the softmax denominator (attention sinks)."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all sequences, over all ranks."""
        return self.layout.lengths


def attend_flat(query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
    """Attention of flat tokens that are all on this rank; shapes as in `flat_attention`.

    One kernel call where a `varlen_kernel` supports the inputs, otherwise calls for each sequence.
    """
    if how.layout.blocks:
        return _attend_blocks(query, key, value, how)
    head_size = max(query.shape[-1], value.shape[-1])
    kernel = varlen_kernel(
        query.device, query.dtype, head_size, softcap=how.softcap != 0, sinks=how.sinks_H is not None
    )
    if kernel is not None:
        sequences = how.layout.sequences(query.device)
        return kernel(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            sequences,
            sequences,
            scale=how.scale,
            window=how.window,
            softcap=how.softcap,
            sinks_H=how.sinks_H,
        )[None]
    lengths = how.lengths
    by_scores = bool(how.softcap) or how.sinks_H is not None
    plain = not by_scores and not 0 < how.window < max(lengths) and value.shape[-1] == query.shape[-1]
    if plain and blocked_attention is not None and blocked_attention.usable(query, lengths):
        return blocked_attention.blocked_attention(query, key, value, lengths, how.scale)
    if not by_scores and query.device.type != "cpu" and key.shape[1] != query.shape[1]:
        # Only flash-attn has grouped heads on devices. Otherwise torch would write all scores, H × L² of them.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    attend = _in_blocks(partial(attend_scores if by_scores else _attend, how))
    # Split, not sliced: a split's gradient is one concatenation, a slice's gradient a zero tensor of the full length.
    pieces = (torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value))
    outputs_LHD = [attend(q, k, v, how.window).transpose(1, 2) for q, k, v in zip(*pieces, strict=True)]
    return torch.cat(outputs_LHD, dim=1)


def _attend_blocks(query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
    """`attend_flat` with `FlatLayout.blocks`; sequences without any are attended as usual, one at a time."""
    if how.softcap or how.sinks_H is not None:
        raise UnsupportedError("attention with blocks has neither a soft-cap nor sinks")
    outputs_LHD: list[Tensor] = []
    pieces = (torch.split(tensor, list(how.lengths), dim=2) for tensor in (query, key, value))
    for q, k, v, block_L in zip(*pieces, how.layout.blocks, strict=True):
        length = q.shape[2]
        if block_L is None:
            attended = _in_blocks(partial(_attend, how))(q, k, v, how.window)
        else:
            places_L = torch.arange(length, device=q.device)
            together_LL = (block_L[:, None] == block_L) & (block_L >= 0)
            near_LL = places_L > places_L[:, None] - (how.window or length)
            mask_LL = (_visible(length, length, length, q.device) | together_LL) & near_LL
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask_LL, scale=how.scale, enable_gqa=k.shape[1] != q.shape[1]
            )
        outputs_LHD.append(attended.transpose(1, 2))
    return torch.cat(outputs_LHD, dim=1)


def _in_blocks(attend: Attend) -> Attend:
    """`attend`, of a window, for blocks of queries with only the keys that they see.

    Masks, scores and products of the whole `[L, L]` square never exist.
    """

    def attend_blocks(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        length = query.shape[2]
        if not 0 < window < length:
            return attend(query, key, value, 0)
        size, start = max(window, MIN_BLOCK), 0
        outputs: list[Tensor] = []
        for block in torch.split(query, size, dim=2):
            first, end = max(0, start + 1 - window), start + block.shape[2]
            outputs.append(attend(block, key[:, :, first:end], value[:, :, first:end], window))
            start = end
        return torch.cat(outputs, dim=2)

    return attend_blocks


def _attend(how: AttentionOptions, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Attention of queries that are the last tokens of the keys."""
    mask = _visible(query.shape[2], key.shape[2], window, query.device) if window else None
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=how.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def attend_scores(how: AttentionOptions, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Attention of queries that are the last tokens of the keys, with soft-capped scores (Gemma 2) and sinks (gpt-oss).

    torch's fused kernels support neither on every device.
    """
    _, heads, length, size = query.shape
    groups, seen = key.shape[1], key.shape[2]
    # Query heads that share a key head become rows of one matrix, so keys need not be repeated.
    rows_KRD = query.reshape(groups, heads // groups * length, size)
    scores_KRS = torch.matmul(rows_KRD, key[0].transpose(1, 2)) * how.scale
    if how.softcap:
        scores_KRS = torch.tanh(scores_KRS / how.softcap) * how.softcap
    hidden = ~_visible(length, seen, window or seen, query.device)
    scores_HLS = scores_KRS.view(heads, length, seen).masked_fill(hidden, float("-inf")).float()
    if how.sinks_H is not None:
        sinks_HL1 = how.sinks_H.float()[:, None, None].expand(heads, length, 1)
        scores_HLS = torch.cat([scores_HLS, sinks_HL1], dim=-1)
    weights_HLS = torch.softmax(scores_HLS, dim=-1)[..., :seen].to(query.dtype)
    attended = torch.matmul(weights_HLS.reshape(groups, heads // groups * length, seen), value[0])
    return attended.view(1, heads, length, value.shape[-1])


def _visible(length: int, seen: int, window: int, device: torch.device) -> Tensor:
    """Visibility mask, bool `[L, S]`, of queries that are the last tokens of the keys.

    Each sees `window` keys, its own included.
    """
    keys_S = torch.arange(seen, device=device)
    queries_L1 = keys_S[seen - length :, None]
    return (keys_S <= queries_L1) & (keys_S > queries_L1 - window)


def flat_positions(lengths: Sequence[int]) -> Tensor:
    """Positions within each sequence, counted from 0, `[T]`."""
    return torch.cat([torch.arange(length) for length in lengths])
