"""Decoder that uses compiled kernels (roll-kernels) between the matrix products of a decoding step.

By default it runs on a CPU; on CUDA only with `kernels: compiled`.

    norm -> QKV -> (norm, rope, append, attend) -> out -> (add, norm) -> gate, up -> gate -> down -> (add, norm) -> ...

Prefill is that of `Decoder`. Attention reads each row only up to the row's own length, so the cost of a step is the sum
of row lengths. Cache contents beyond the end of a row have no effect.

N rows    C hidden size    V vocabulary
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from roll_core.errors import ExtensionError, UnsupportedError
from roll_infer_hf.decoder import Decoder
from roll_modeling.kernels import decode
from roll_modeling.memory import padded_rows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def decoder_class(model: PreTrainedModel, kernels: Literal["auto", "torch", "compiled"]) -> type[Decoder]:
    """Decoder class for this model, device and `kernels` setting.

    `auto` falls back to `Decoder` if compiled kernels are unavailable, and always on CUDA. `compiled` raises
    `UnsupportedError` if the device or dtype is unsupported, and `ExtensionError` if compilation fails or roll-kernels
    is not installed.
    """
    if kernels == "torch":
        return Decoder
    if decode is None:
        if kernels == "compiled":
            raise ExtensionError("kernels: compiled needs roll-kernels: pip install roll-kernels, or use kernels: auto")
        log.info("hf_infer decodes with PyTorch operators, which is slower: roll-kernels is not installed")
        return Decoder
    device = model.device.type
    if device not in ("cpu", "cuda") or torch.version.hip or model.dtype not in decode.DTYPES:
        if kernels == "compiled":
            raise UnsupportedError(
                f"kernels: compiled supports float32 and bfloat16 on a CPU or on CUDA, not {model.dtype} on"
                f" {model.device}; set strategy_config.kernels to auto"
            )
        return Decoder
    if device == "cuda":
        # PyTorch operators by default: the CUDA kernels are not tested on a GPU.
        if kernels == "auto":
            return Decoder
        decode.cuda_library()
        return CompiledDecoder
    try:
        decode.library()
    except ExtensionError as error:
        if kernels == "compiled":
            raise
        log.info("hf_infer decodes with PyTorch operators, which is slower: %s", error)
        return Decoder
    return CompiledDecoder


class CompiledDecoder(Decoder):
    """`Decoder` whose decoding step uses `DecodeKernels`."""

    def __init__(self, model: PreTrainedModel, *, cache_bytes: int, max_rows: int, pack: bool = True) -> None:
        super().__init__(model, cache_bytes=cache_bytes, max_rows=max_rows, pack=pack)
        attention: Any = self._model.model.layers[0].self_attn
        norm = getattr(attention, "q_norm", None)
        self._rms_epsilon = float(self._model.model.norm.variance_epsilon)
        self._kernels = decode.DecodeKernels(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            qk_epsilon=0.0 if norm is None else float(norm.variance_epsilon),
            dtype=self.dtype,
            device=self.device,
        )

    def refresh(self) -> None:
        """Refresh the views of parameters, and convert the query and key norms to float32 for the kernels.

        The conversion is a no-op on a CPU. `_need_positions` does the same for the tables of cosines and sines.
        """
        super().refresh()
        norms = [layer.qk_norm_HD for layer in self._layers]
        self._qk_norms = [None if norm is None else norm.float() for norm in norms]
        self._pads_rows = any(layer.gate_up.pads_rows for layer in self._layers)

    def _need_positions(self, num: int) -> None:
        super()._need_positions(num)
        self._tables = self._cos.float(), self._sin.float()

    def cache_dtype(self) -> torch.dtype:
        """Dtype of the model: bfloat16 halves the memory traffic."""
        dtype: torch.dtype = self.dtype
        return dtype

    @torch.inference_mode()
    def decode(self, tokens_N: Tensor) -> Tensor:
        """Append a token to every row and run one decoding step over all rows.

        If projections pad their rows, the batch is padded instead, once, with token 0.
        """
        kernels, epsilon, num = self._kernels, self._rms_epsilon, len(tokens_N)
        self._rows.expose(num, int(self._lengths_N.max()) + 1)
        kernels.begin(self._rows.keys[0], self._positions_N)
        if self._pads_rows:
            tokens_N = F.pad(tokens_N, (0, padded_rows(num) - num))
        hidden = F.embedding(tokens_N, self._embedding)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(kernels.add_norm(hidden, added, layer.input_norm, epsilon))
            keys, values = self._rows.keys[index], self._rows.values[index]
            attended = kernels.attend(qkv, self._qk_norms[index], *self._tables, keys, values)
            normed = kernels.add_norm(hidden, layer.out(attended), layer.mlp_norm, epsilon)
            added = layer.down(kernels.gate(layer.gate_up(normed)))
        self._count_step()
        return self._head(kernels.add_norm(hidden, added, self._final_norm, epsilon))[:num].float()
