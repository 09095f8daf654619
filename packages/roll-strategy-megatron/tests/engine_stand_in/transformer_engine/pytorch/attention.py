"""Attention over packed sequences (`thd`), as one masked softmax over all tokens of the microbatch.

Context parallel ranks have the r-th and the (2 · CP - 1 - r)-th of 2 · CP pieces of each sequence, padding included."""

from itertools import pairwise

import torch

from transformer_engine.pytorch.module import collectives


def places(cu_seqlens, cu_seqlens_padded, rank, size):
    """Of a rank's tokens: which sequence, which place in it, and whether it is one rather than padding."""
    found = []
    bounds = cu_seqlens_padded.tolist()
    lengths = cu_seqlens.diff().tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        every = torch.arange(end - start)
        if size > 1:
            assert (end - start) % (2 * size) == 0
            pieces = every.chunk(2 * size)
            every = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
        found.append(torch.stack([torch.full_like(every, number), every, (every < lengths[number]).long()]))
    return torch.cat(found, dim=1)


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        *,
        num_attention_heads,
        kv_channels,
        attention_dropout,
        attn_mask_type,
        sequence_parallel,
        tp_size,
        get_rng_state_tracker,
        tp_group,
        layer_number,
        num_gqa_groups,
        attention_type,
        softmax_scale,
        window_size=None,
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
    ):
        assert (attn_mask_type, attention_type, cp_comm_type) == ("causal", "self", "p2p")
        assert attention_dropout == 0.0
        super().__init__()
        self.heads, self.groups = num_attention_heads // tp_group.size(), num_gqa_groups // tp_group.size()
        self.sizes = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        assert self.sizes[0] == self.sizes[1]  # of packed sequences, values as large as keys
        self.scale = self.sizes[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.window, self.cp_group = window_size, cp_group
        assert cp_group is None or window_size is None

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        *,
        attn_mask_type,
        qkv_format,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        max_seqlen_q,
        max_seqlen_kv,
        pad_between_seqs=None,
    ):
        assert pad_between_seqs is None  # found out from the lengths
        assert (attention_mask, attn_mask_type, qkv_format) == (None, "padding_causal", "thd")
        assert query.shape[1:] == (self.heads, self.sizes[0])
        assert key.shape[1:] == (self.groups, self.sizes[0]) == value.shape[1:]
        size = 1 if self.cp_group is None else self.cp_group.size()
        assert size == 1 or (cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None)
        assert all(each.dtype == torch.int32 for each in (cu_seqlens_q, cu_seqlens_kv))
        padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        assert int(padded.diff().max()) <= max_seqlen_q
        assert max_seqlen_q == max_seqlen_kv
        rank = 0 if size == 1 else self.cp_group.rank()
        mine = places(cu_seqlens_q, padded, rank, size)
        every = torch.cat([places(cu_seqlens_kv, padded, each, size) for each in range(size)], dim=1)
        if size > 1:
            key, value = (collectives.gather(each, self.cp_group) for each in (key, value))
        seen = (mine[0][:, None] == every[0]) & (mine[1][:, None] >= every[1]) & (every[2] == 1)
        if self.window is not None:
            seen &= mine[1][:, None] - every[1] <= self.window[0]
        repeats = self.heads // self.groups
        key, value = (each.float().repeat_interleave(repeats, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * self.scale
        weights = torch.softmax(scores.masked_fill(~seen, -1e30), dim=-1)
        found = torch.einsum("hqk,khd->qhd", weights, value) * (mine[2] == 1)[:, None, None]
        return found.to(query.dtype).flatten(1)
