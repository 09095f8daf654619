"""Stand-in for torch-npu: simulated devices under the names of Ascend's. What is never called here raises if it is."""

import os

import torch

from roll_platform_sim.device import register

__version__ = "2.13.0"

register(
    "npu",
    num_devices=int(os.environ["NPU_HOST_DEVICES"]),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    collective_backend="hccl",
)


def autoload() -> None:
    """Entry point by which torch loads this module."""


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
):
    """Ascend's function for packed sequences, with its documented rules, by plain operators in float32."""
    assert (pse, padding_mask, prefix, input_layout, keep_prob) == (None, None, None, "TND", 1.0)
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.device == key.device == value.device == atten_mask.device
    assert query.shape[1] == head_num
    assert head_num % key.shape[1] == 0
    assert query.shape[2] % 16 == 0
    assert (atten_mask.shape, atten_mask.dtype) == ((2048, 2048), torch.bool)
    assert sparse_mode in (3, 4)  # causal from the last token; a band from there
    parts, first_query, first_key = [], 0, 0
    for end_query, end_key in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        assert first_query < end_query
        q, k, v = query[first_query:end_query], key[first_key:end_key], value[first_key:end_key]
        repeats = head_num // key.shape[1]
        k, v = (each.float().repeat_interleave(repeats, dim=1) for each in (k, v))
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        seen = (ahead <= 0) if sparse_mode == 3 else (ahead <= next_tockens) & (ahead >= -pre_tockens)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
        weights = torch.softmax(scores.masked_fill(~seen.to(query.device), -torch.inf), dim=-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        first_query, first_key = end_query, end_key
    assert (first_query, first_key) == (len(query), len(key))
    return torch.cat(parts).to(query.dtype), None, None, None, 0, 0, 0


def __getattr__(name: str) -> object:
    if not name.startswith("npu_"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torch_npu.{name} is not simulated")

    return missing
