"""Fast path of the engine: a functional forward pass for decoders of the Llama family.

Weights are the parameters of the transformers model itself. Sibling projections that are adjacent in memory (`layout`)
are multiplied as one fused view. RoPE, epsilon and biases are read from that model, the single source of truth.
`unsupported` detects architectures that need anything else; these use `module_runner.ModuleRunner`.

T flat tokens    N rows    H query heads    K key/value heads    G = H / K    D head size    W positions    V vocabulary
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from roll_infer_hf.kv_cache import KVCache, aligned
from roll_infer_hf.runner import CachedPrompt, PromptChunk, Runner
from roll_modeling.kernels import products
from roll_modeling.layout import adjacent
from roll_modeling.memory import padded_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor
    from transformers import PreTrainedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
"""Supported `model_type`s: their decoder layers differ only in biases and query/key norms."""
LOGPROB_ROWS = 1024
"""Number of prompt tokens whose logits are materialized at once for prompt logprobs."""
_PACKS = products is not None and products.HAS_ONEDNN and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
_PACKED_DTYPES = (
    (torch.float32, torch.bfloat16)
    if _PACKS and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # AVX-512 or avx_ne_convert
    else (torch.float32,)
)


def unsupported(model: PreTrainedModel) -> str | None:
    """Reason why this model cannot use the fast path; None if it can."""
    config: Any = model.config
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention"} or (not layer_types and getattr(config, "sliding_window", None) is not None):
        return "sliding windows"
    rope = str(model.model.rotary_emb.rope_type)
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"rope {rope}, which depends on the sequence length"
    if getattr(config, "pretraining_tp", 1) != 1:
        return "pretraining_tp"
    first = model.model.layers[0]
    linears = [first.self_attn.q_proj, first.self_attn.o_proj, first.mlp.gate_proj, first.mlp.down_proj, model.lm_head]
    if not all(type(linear) is torch.nn.Linear for linear in linears):
        return "wrapped or quantized layers"
    return None


def math_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Dtype in which queries and keys are weighted and rotated: float32 on a CPU, otherwise that of the model."""
    return torch.float32 if device.type == "cpu" else dtype


def _is_large(weight_OI: Tensor) -> bool:
    return weight_OI.device.type == "cpu" and weight_OI.numel() >= products.ONEDNN_MIN_WEIGHTS


class Projection:
    """Linear layer `x @ weight.T + bias`.

    For float32 on a CPU PyTorch calls MKL, but oneDNN (with roll-kernels) is faster on non-Intel processors. oneDNN is
    faster still with weights packed into its own layout. `benchmarks/rollout.py` measures the three as `linear`,
    `onednn` and `packed`. A packed weight is a copy: create a new `Projection` after the weight has changed.
    """

    __slots__ = ("_bias", "_weight", "pads_rows", "weight")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, pack: bool, num_rows: int = 64) -> None:
        self.weight = weight_OI
        self._bias = bias_O
        packed = _PACKS and pack and weight_OI.dtype in _PACKED_DTYPES and _is_large(weight_OI)
        self.pads_rows = packed or (products is not None and products.prefers_onednn(weight_OI))
        """True if oneDNN computes the products; their rows are padded to `padded_rows`."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, num_rows) if packed else weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Apply the layer: `[T, I]` to `[T, O]`."""
        if self.pads_rows:
            num_rows = len(x_TI)
            if more := padded_rows(num_rows) - num_rows:
                x_TI = F.pad(x_TI, (0, 0, 0, more))
            return products.onednn_linear(x_TI, self._weight, self._bias)[:num_rows]
        return F.linear(x_TI, self._weight, self._bias)


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer, with fused projections."""

    path: str
    """Name of the layer in the model."""
    input_norm: Tensor
    qkv: Projection
    qk_norm_HD: Tensor | None
    """`[H + K, D]` query heads first, then key heads; None without query/key norms. float32 on a CPU, else the model's
    dtype."""
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Decoder(Runner):
    """Runner that prefills prompts as one flat batch without padding, and decodes rows as one dense batch."""

    can_split = True

    def __init__(self, model: PreTrainedModel, *, cache_bytes: int, max_rows: int, pack: bool = True) -> None:
        config: Any = model.config
        self._model: Any = model
        self._pack = pack
        self.device = model.device
        self.dtype = model.dtype
        self.max_positions = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        attention = self._model.model.layers[0].self_attn
        self.head_dim = int(attention.head_dim)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.scale = float(attention.scaling)
        self._cache_bytes, self._max_rows = cache_bytes, max_rows
        self._math_dtype = math_dtype(self.device, self.dtype)
        self._rows = self._cache(max_rows, self.max_positions, cache_bytes)
        self._set_lengths(np.zeros(0, dtype=np.int64))
        self._zero = torch.zeros(1, dtype=self.cache_dtype(), device=self.device)
        self._cos = self._sin = torch.empty(0)
        self._recorded: dict[str, Tensor] | None = None
        self.refresh()

    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache: float32 on a CPU, otherwise the dtype of the model.

        On a CPU small batched matrix products are slower in bfloat16 than in float32, although bfloat16 reads half the
        bytes.
        """
        return self._math_dtype

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """Record the activations of prefills."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _record(self, path: str, **activations: Tensor) -> None:
        """Keep activations below the module `path`, if they are recorded; `__input` is an input."""
        if self._recorded is not None:
            for name, tensor in activations.items():
                point = ".".join(filter(None, (path, name.replace("__", ":"))))
                self._recorded[point] = tensor.detach().flatten(1).to("cpu", torch.float32, copy=True)

    # -- room ----------------------------------------------------------------------------------------------------------

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """True if `num_rows` rows fit, each allocated for the longest row of `num_tokens` tokens."""
        num_bytes = num_rows * aligned(num_tokens) * self._rows.token_bytes
        return num_rows <= self._max_rows and num_bytes <= self._cache_bytes

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Reserve the full length of each row."""
        used = len(self._lengths_N)
        self._rows.reserve(num_rows, num_tokens, used, int(self._lengths_N.max(initial=0)))
        self._need_positions(num_tokens)

    def forget(self, prompt: CachedPrompt) -> None:
        """Drop the reference to the prompt's cache, which is freed with its last prompt."""
        prompt.cache, prompt.slot = None, -1

    def _cache(self, max_rows: int, max_positions: int, max_bytes: int | None = None) -> KVCache:
        """Cache for `max_rows` rows of `max_positions`, in at most `max_bytes`."""
        sizes: dict[str, Any] = {
            "num_layers": len(self._model.model.layers),
            "num_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.cache_dtype(),
        }
        token_bytes = 2 * sizes["num_layers"] * self.num_kv_heads * self.head_dim * sizes["dtype"].itemsize
        needed = max_rows * aligned(max_positions) * token_bytes
        limit = needed if max_bytes is None else min(needed, max_bytes)
        return KVCache(**sizes, device=self.device, max_rows=max_rows, max_bytes=limit)

    # -- prompts -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Compute all chunks as one flat batch: GEMMs over all tokens, attention per chunk."""
        self._allocate_prompts([chunk.prompt for chunk in chunks if chunk.prompt.cache is None])
        for chunk in chunks:
            self._need_positions(chunk.end)
        tokens_T = torch.from_numpy(np.concatenate([chunk.prompt.tokens[chunk.begin : chunk.end] for chunk in chunks]))
        positions_T = torch.from_numpy(np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in chunks]))
        # `non_blocking`, or torch waits until the device has done all earlier work.
        cos_T1D, sin_T1D = self._rope(positions_T.to(self.device, non_blocking=True))
        hidden = F.embedding(tokens_T.to(self.device, non_blocking=True), self._embedding)
        self._record("model", embed_tokens=hidden)
        bounds = np.cumsum([0] + [chunk.end - chunk.begin for chunk in chunks])
        for index, layer in enumerate(self._layers):
            qk, value = self._project(layer, hidden, cos_T1D, sin_T1D)
            attended = self._attend_chunks(index, chunks, bounds, qk, value)
            self._finish_layer(layer, hidden, attended)
            self._record("", **{layer.path: hidden})
        lasts = [int(bounds[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.last]
        for i, chunk in enumerate(chunks):
            chunk.prompt.done = chunk.end
            if chunk.prompt.logprobs_wanted:
                self._score(chunk, hidden[bounds[i] : bounds[i + 1]])
        if self._recorded is not None:
            self._logits(hidden)
        return self._logits(hidden[lasts], record=False)

    def _attend_chunks(
        self, index: int, chunks: Sequence[PromptChunk], bounds: npt.NDArray[np.int64], qk: Tensor, value: Tensor
    ) -> Tensor:
        query = qk[:, : self.num_heads]
        for i, chunk in enumerate(chunks):
            donor = chunk.prompt.donor
            keys, values = _keys_values(chunk.prompt, index)
            begin, end = int(bounds[i]), int(bounds[i + 1])
            if donor is not None and chunk.begin == chunk.prompt.donated:
                for cached, donated in zip((keys, values), _keys_values(donor, index), strict=True):
                    cached[:, : chunk.begin] = donated[:, : chunk.begin]
            keys[:, chunk.begin : chunk.end] = qk[begin:end, self.num_heads :].transpose(0, 1)
            values[:, chunk.begin : chunk.end] = value[begin:end].transpose(0, 1)
        attended = torch.empty(query.shape, dtype=query.dtype, device=self.device)
        i = 0
        while i < len(chunks):
            # Pieces of equal bounds in adjacent rows of one cache need only one attention call.
            j = i + 1
            first = chunks[i]
            cache: Any = first.prompt.cache
            while (
                j < len(chunks)
                and (chunks[j].begin, chunks[j].end) == (first.begin, first.end)
                and chunks[j].prompt.cache is cache
                and chunks[j].prompt.slot == first.prompt.slot + j - i
            ):
                j += 1
            flat = slice(int(bounds[i]), int(bounds[j]))
            slots = slice(first.prompt.slot, first.prompt.slot + j - i)
            attended[flat] = self._attend_prompts(
                query[flat].to(cache.dtype).view(j - i, -1, self.num_heads, self.head_dim),
                cache.keys[index][slots, :, : first.end],
                cache.values[index][slots, :, : first.end],
            ).flatten(0, 1)
            i = j
        return attended

    def _attend_prompts(self, query_SLHD: Tensor, keys_SKWD: Tensor, values_SKWD: Tensor) -> Tensor:
        num, length = query_SLHD.shape[:2]
        groups = self.num_heads // self.num_kv_heads
        width = keys_SKWD.shape[2]
        mask = None
        if 1 < length < width:
            last = torch.arange(width - length, width, device=self.device).unsqueeze(1)
            mask = torch.arange(width, device=self.device) <= last
        # The G query heads of a key head form a batch dimension of their own; keys have stride 0 along it.
        result: Tensor = F.scaled_dot_product_attention(
            query_SLHD.transpose(1, 2).reshape(num * self.num_kv_heads, groups, length, self.head_dim),
            keys_SKWD.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
            values_SKWD.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
            attn_mask=mask,
            is_causal=mask is None and length > 1,
            scale=self.scale,
        )
        return result.view(num, self.num_heads, length, -1).transpose(1, 2)

    def _score(self, chunk: PromptChunk, hidden_TC: Tensor) -> None:
        """Store the logprobs of the tokens that follow the chunk's tokens, `[begin + 1, end + 1)`, in the prompt."""
        followed = min(chunk.end, len(chunk.prompt) - 1) - chunk.begin
        for start in range(0, max(followed, 1), LOGPROB_ROWS):
            logits = self._logits(hidden_TC[start : min(start + LOGPROB_ROWS, followed)])
            chunk.prompt.store(chunk.begin + 1 + start, torch.log_softmax(logits, dim=-1))

    # -- rows ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def join(self, prompts: Sequence[CachedPrompt]) -> None:
        """Append one row per prompt; each row gets its own copy of the prompt's keys and values."""
        lengths_N = np.append(self._lengths_N, [len(prompt) for prompt in prompts]).astype(np.int64)
        self._rows.expose(len(lengths_N), int(lengths_N.max()))
        for row, prompt in enumerate(prompts, start=len(self._lengths_N)):
            assert prompt.cache is not None  # noqa: S101 - it is prefilled
            self._rows.take(prompt.cache, prompt.slot, row, len(prompt))
        self._set_lengths(lengths_N)

    def _set_lengths(self, lengths_N: npt.NDArray[np.int64]) -> None:
        """Set the number of cached positions of each row, which is the position of its next token."""
        self._lengths_N = lengths_N
        self._positions_N = torch.from_numpy(lengths_N).to(self.device, non_blocking=True)

    def _count_step(self) -> None:
        """Count the token that was appended to every row. The device counts for itself."""
        self._lengths_N = self._lengths_N + 1
        self._positions_N = self._positions_N + 1

    @torch.inference_mode()
    def decode(self, tokens_N: Tensor) -> Tensor:
        """Append a token to every row and run one dense step; attention uses batched products over cache views."""
        lengths_N, positions_N = self._lengths_N, self._positions_N
        num, width = len(lengths_N), int(lengths_N.max()) + 1
        self._rows.expose(num, width)
        cos_N1D, sin_N1D = self._rope(positions_N)
        hidden = F.embedding(tokens_N, self._embedding)
        bias_N1W = None
        if (lengths_N != width - 1).any():
            beyond = torch.arange(width, device=self.device) > positions_N.unsqueeze(1)
            bias_N1W = torch.zeros(beyond.shape, dtype=self._rows.dtype, device=self.device)
            bias_N1W = bias_N1W.masked_fill_(beyond, -torch.inf).unsqueeze(1)
        place = None if bias_N1W is None else self._place(positions_N)
        for index, layer in enumerate(self._layers):
            qk, value = self._project(layer, hidden, cos_N1D, sin_N1D)
            self._append(index, qk[:, self.num_heads :], value, width - 1, place)
            attended = self._attend_rows(index, qk[:, : self.num_heads], width, bias_N1W)
            self._finish_layer(layer, hidden, attended)
        self._count_step()
        return self._logits(hidden)

    def _place(self, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Index of each row's next key and value, for `index_put_`."""
        rows = torch.arange(len(positions_N), device=self.device)
        heads = torch.arange(self.num_kv_heads, device=self.device)
        return rows.unsqueeze(1), heads, positions_N.unsqueeze(1)

    def _append(
        self, index: int, key_NKD: Tensor, value_NKD: Tensor, last: int, place: tuple[Tensor, ...] | None
    ) -> None:
        keys, values, num = self._rows.keys[index], self._rows.values[index], len(key_NKD)
        if place is None:
            # All rows have the same length, as after a common start: a strided copy takes a third of a scatter's time.
            keys[:num, :, last] = key_NKD
            values[:num, :, last] = value_NKD
        else:
            keys.index_put_(place, key_NKD)
            values.index_put_(place, value_NKD)

    def _attend_rows(self, index: int, query_NHD: Tensor, width: int, bias_N1W: Tensor | None) -> Tensor:
        """Attention with one query per row and head: the G query heads of a key head form one small matrix product.

        On a CPU two batched products are faster than PyTorch's fused attention, which is optimized for many queries.
        On a device the fused kernels keep scores in float32.
        """
        num, heads, size = query_NHD.shape
        if self.device.type != "cpu":
            keys, values = (cache[index][:num, :, :width] for cache in (self._rows.keys, self._rows.values))
            mask = None if bias_N1W is None else bias_N1W.unsqueeze(1)
            query = query_NHD.view(num, self.num_kv_heads, -1, size)
            return F.scaled_dot_product_attention(query, keys, values, mask, scale=self.scale).reshape(num, heads, size)
        keys, values = self._rows.matrices(index, num, width)
        query = query_NHD.reshape(num * self.num_kv_heads, -1, size)
        scores = torch.baddbmm(self._zero, query, keys.transpose(1, 2), beta=0, alpha=self.scale)
        if bias_N1W is not None:
            # Positions beyond a row's end get probability 0; their values are finite, see KVCache.expose.
            scores.view(num, heads, width).add_(bias_N1W)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(num, heads, size)

    @torch.inference_mode()
    def drop(self, kept_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Remove rows; rows from the end move into the gaps."""
        order = np.arange(len(kept_N))
        num = int(kept_N.sum())
        movers = iter(np.flatnonzero(kept_N[num:]) + num)
        for hole in np.flatnonzero(~kept_N[:num]):
            mover = int(next(movers))
            self._rows.move(mover, int(hole), int(self._lengths_N[mover]))
            order[hole] = mover
        order = order[:num]
        self._set_lengths(self._lengths_N[order])
        if num == 0:
            self._rows.forget()
        return order

    @torch.inference_mode()
    def scrub(self, rows: npt.NDArray[np.int64]) -> None:
        """Zero the cache of rows with non-finite values, which would turn masked products of later rows into NaN."""
        self._rows.clear(rows)

    # -- layers --------------------------------------------------------------------------------------------------------

    def _project(self, layer: Layer, hidden: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys `[T, H + K, D]`, normed and rotated (RoPE), and values `[T, K, D]`."""
        normed = self._norm(hidden, layer.input_norm)
        qkv = layer.qkv(normed)
        heads = qkv.to(self._math_dtype).view(len(hidden), -1, self.head_dim)
        turned = self.num_heads + self.num_kv_heads
        qk, value = heads[:, :turned], heads[:, turned:]
        if self._recorded is not None:
            self._record(layer.path, input_layernorm=normed)
            query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
            self._record(f"{layer.path}.self_attn", q_proj=query, k_proj=key, v_proj=value)
        if layer.qk_norm_HD is not None:
            # The norm is float32; as in transformers, it is rounded before the weight is applied.
            qk = (qk * self._inverse_rms(qk, self._qk_epsilon)).to(self._math_dtype).mul_(layer.qk_norm_HD)
            query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
            self._record(f"{layer.path}.self_attn", q_norm=query, k_norm=key)
        swapped = torch.roll(qk, self.head_dim // 2, dims=-1)
        return torch.addcmul(qk * cos_T1D, swapped, sin_T1D), value

    def _finish_layer(self, layer: Layer, hidden: Tensor, attended: Tensor) -> None:
        """Apply the output projection and the MLP; adds both to `hidden` in place."""
        attended = attended.flatten(1).to(self.dtype)
        attention_output = layer.out(attended)
        hidden.add_(attention_output)
        normed = self._norm(hidden, layer.mlp_norm)
        gate_up = layer.gate_up(normed)
        gate, up = gate_up.chunk(2, dim=-1)
        if self._recorded is not None:
            self._record(f"{layer.path}.self_attn", o_proj__input=attended, o_proj=attention_output)
            self._record(layer.path, post_attention_layernorm=normed)
            self._record(f"{layer.path}.mlp", gate_proj=gate, up_proj=up)
        activated = F.silu(gate).mul_(up)
        mlp_output = layer.down(activated)
        self._record(f"{layer.path}.mlp", down_proj__input=activated, down_proj=mlp_output)
        hidden.add_(mlp_output)

    def _logits(self, hidden: Tensor, *, record: bool = True) -> Tensor:
        normed = self._norm(hidden, self._final_norm)
        logits = self._head(normed).float()
        if record:
            self._record("model", norm=normed)
            self._record("", lm_head=logits)
        return logits

    def _norm(self, x_TC: Tensor, weight_C: Tensor) -> Tensor:
        """RMSNorm with the rounding of transformers: float32 until the weight is applied.

        PyTorch's own `rms_norm` is slower on a CPU.
        """
        return torch.mul(x_TC, self._inverse_rms(x_TC, self._epsilon)).to(self.dtype).mul_(weight_C)

    def _inverse_rms(self, x: Tensor, epsilon: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)

    # -- preparation ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refresh(self) -> None:
        """Rebuild the fused views of the model's parameters and the tensors derived from them."""
        inner = self._model.model
        self._layers = [self._layer(f"model.layers.{index}", layer) for index, layer in enumerate(inner.layers)]
        self._embedding = inner.embed_tokens.weight.detach()
        self._final_norm = inner.norm.weight.detach()
        self._head = self._projection(self._model.lm_head)
        self._epsilon = torch.tensor(inner.norm.variance_epsilon, dtype=torch.float32, device=self.device)
        attention = inner.layers[0].self_attn
        norm = getattr(attention, "q_norm", None)
        self._qk_epsilon = self._epsilon if norm is None else torch.full_like(self._epsilon, norm.variance_epsilon)

    def release(self) -> None:
        """Free the KV cache and drop all views of parameters."""
        self._rows.release()
        del self._layers, self._embedding, self._final_norm, self._head

    def _layer(self, path: str, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            qk_norm = torch.cat([query.expand(self.num_heads, -1), key.expand(self.num_kv_heads, -1)])
            qk_norm = qk_norm.to(self._math_dtype)
        return Layer(
            path=path,
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=self._projection(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm_HD=qk_norm,
            out=self._projection(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._projection(mlp.gate_proj, mlp.up_proj),
            down=self._projection(mlp.down_proj),
        )

    def _projection(self, *linears: Any) -> Projection:
        weight, bias = _fused(*linears)
        return Projection(weight, bias, pack=self._pack)

    @torch.inference_mode()
    def _need_positions(self, num: int) -> None:
        """Extend the cosine and sine tables to `num` positions, computed and rounded by the model's own rotary module.

        The rotation is `x * cos + roll(x) * sin`; the sines include the sign of rotate-half.
        """
        if num <= len(self._cos):
            return
        num = min(max(2 * num, 512), self.max_positions)
        like = torch.empty(1, dtype=self.dtype, device=self.device)
        cos_1WD, sin_1WD = self._model.model.rotary_emb(like, torch.arange(num, device=self.device).unsqueeze(0))
        half = self.head_dim // 2
        self._cos = cos_1WD[0].to(self._math_dtype).unsqueeze(1)
        sin = sin_1WD[0].to(self._math_dtype)
        self._sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1).unsqueeze(1)

    def _allocate_prompts(self, prompts: Sequence[CachedPrompt]) -> None:
        """Give prompts of equal length adjacent rows of one cache, so that a long prompt widens no other's row."""
        by_length: dict[int, list[CachedPrompt]] = {}
        for prompt in prompts:
            by_length.setdefault(len(prompt), []).append(prompt)
        for length, group in by_length.items():
            cache = self._cache(len(group), length)
            cache.reserve(len(group), length, 0, 0)
            for slot, prompt in enumerate(group):
                prompt.cache, prompt.slot = cache, slot


def _keys_values(prompt: CachedPrompt, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a prefilled prompt in one layer, each `[K, W, D]`."""
    cache: Any = prompt.cache
    return cache.keys[layer][prompt.slot], cache.values[layer][prompt.slot]


def _fused(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of sibling layers as one matrix: a view if they are adjacent in memory, otherwise a copy."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [_bias(linear) for linear in linears]
    weight = adjacent(weights)
    present = [bias for bias in biases if bias is not None]
    bias = (adjacent(present) if len(present) == len(linears) else None) if present else None
    if weight is None:
        weight = torch.cat(weights)
    if present and bias is None:
        bias = torch.cat([b if b is not None else w.new_zeros(len(w)) for w, b in zip(weights, biases, strict=True)])
    return weight, bias


def _bias(linear_layer: Any) -> Tensor | None:
    bias = linear_layer.bias
    return None if bias is None else bias.detach()
