"""Causal attention over sequences laid end to end, without padding, by transformers' attention interface.

    tokens   a a a a b b c c c          a query sees its own sequence up to itself,
    segments 0 0 0 0 1 1 2 2 2          and not further back than the layer's window

Shapes: T flat tokens, H query heads, K key/value heads (H a multiple of K), D head size, L length of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from roll_core.errors import UnsupportedError
from roll_modeling.blocked_attention import blocked_attention, usable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


NAME = "roll_flat"
"""Under which transformers knows this attention."""


class SharedAttention(Protocol):
    """Attention over tokens that several ranks share; `context_parallel.ContextParallel` is one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """As `flat_attention`, with this rank's share of the tokens."""
        ...


@dataclass(eq=False)
class FlatLayout:
    """How the flat tokens of one forward pass are cut into sequences; passed to every layer as `roll_layout`."""

    lengths: tuple[int, ...]
    context: SharedAttention | None = None
    """Among whose ranks the tokens are shared."""
    num_calls: int = field(default=0)
    """How many attention layers have run: a layer that mixes tokens by other means is not among them."""


def register() -> None:
    """Make the attention known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, flat_attention)
    AttentionMaskInterface.register(NAME, flat_mask)


def flat_mask(
    *,
    q_length: int,
    config: Any,
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_unused: object,
) -> Tensor:
    """Stands in for a mask: `[1, 1, 1, 1]` with the window of the layers that will get it, 0 for none.

    Raises `UnsupportedError` for what is neither causal nor causal with a window.
    """
    del q_length
    chunk = getattr(config, "attention_chunk_size", None)
    if use_vmap or (local_size is not None and local_size == chunk):
        raise UnsupportedError("this architecture's attention mask is neither causal nor a causal window")
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64, device=device)


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
    **_unused: object,
) -> tuple[Tensor, None]:
    """`[1, H, T, D]` queries and `[1, K, T, D]` keys and values to `[1, T, H, D]`."""
    del module
    if roll_layout is None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnsupportedError("flat attention needs a layout of flat tokens, and no cache")
    if dropout or s_aux is not None:
        raise UnsupportedError("flat attention has neither dropout nor attention sinks")
    roll_layout.num_calls += 1
    window = int(attention_mask) if attention_mask is not None else 0
    how = How(
        lengths=roll_layout.lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window or sliding_window or 0,
        softcap=softcap or 0.0,
    )
    context = roll_layout.context
    return (attend_flat if context is None else context.attend)(query, key, value, how), None


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What a layer's attention depends on besides its queries, keys and values."""

    lengths: tuple[int, ...]
    """Of all sequences, whichever rank has their tokens."""
    scale: float
    window: int
    """Tokens that a query sees, itself among them; 0 for all before it."""
    softcap: float
    """Scores are squashed into plus or minus so much; 0 for not at all."""


def attend_flat(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """As `flat_attention`, of all tokens."""
    lengths = how.lengths
    if not how.softcap and not 0 < how.window < max(lengths) and usable(query, lengths):
        return blocked_attention(query, key, value, lengths, how.scale)
    attend = _attend_softcap(how.softcap) if how.softcap else _attend
    # Split, not sliced: the gradient of a split is one concatenation, that of a slice a tensor of zeros as long as all.
    pieces = (torch.split(each, list(lengths), dim=2) for each in (query, key, value))
    outputs_LHD = [attend(q, k, v, how.scale, how.window).transpose(1, 2) for q, k, v in zip(*pieces, strict=True)]
    return torch.cat(outputs_LHD, dim=1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    length = query.shape[2]
    mask = window_mask(length, window, query.device) if 0 < window < length else None
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _attend_softcap(cap: float) -> Callable[[Tensor, Tensor, Tensor, float, int], Tensor]:
    """Scores squashed into ±cap before the softmax (Gemma 2): what the library's kernels cannot do."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        _, heads, length, size = query.shape
        groups = key.shape[1]
        # Heads that share a key head stand as more rows of one matrix: nothing is repeated.
        rows_KRD = query.reshape(groups, heads // groups * length, size)
        scores_KRL = torch.matmul(rows_KRD, key[0].transpose(1, 2)) * scale
        scores_KRL = torch.tanh(scores_KRL / cap) * cap
        scores_KGLL = scores_KRL.view(groups, heads // groups, length, length)
        hidden = ~window_mask(length, window or length, query.device)
        weights_KGLL = torch.softmax(scores_KGLL.masked_fill(hidden, float("-inf")).float(), dim=-1).to(query.dtype)
        attended = torch.matmul(weights_KGLL.view(groups, heads // groups * length, length), value[0])
        return attended.view(1, heads, length, size)

    return attend


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Bool `[L, L]`: query i sees keys i - window + 1 to i."""
    ahead = torch.arange(length, device=device)
    distance = ahead[:, None] - ahead[None, :]
    return (distance >= 0) & (distance < window)


def flat_positions(lengths: Sequence[int]) -> Tensor:
    """Positions counted from 0 in each sequence, `[T]`."""
    return torch.cat([torch.arange(length) for length in lengths])
