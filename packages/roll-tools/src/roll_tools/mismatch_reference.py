"""The reference of `roll-core doctor mismatch`: transformers' own model in float32 with the trainer's weights.

Trainer and engine are each compared with it, so that the doctor knows which side deviates. An edit changes one thing
in the reference: a temperature, the rope base, the dtype of a norm. The edit that reproduces a side's logprobs is the
cause of that side's gap.

L tokens of a sequence, R response tokens, V vocabulary, W width of an activation.
"""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from roll_core.spec.fp8 import BLOCK, is_layers_weight, quantise_blocks, quantise_rows
from roll_modeling.activations import visited
from roll_modeling.images import image_reader
from roll_modeling.model import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Floats, Media, RoutedExperts, SamplingParams, TokenIds

FP8 = torch.float8_e4m3fn
FP8_SCALED = {"fp8 tensors": 0, "fp8 rows": 1, "fp8 blocks": BLOCK}
"""fp8 of the matrices of layers with a scale for each tensor, row or block of 128 × 128."""
FORMATS: tuple[torch.dtype | str, ...] = (torch.bfloat16, torch.float16, FP8, *FP8_SCALED)
"""Formats of weights."""
ATTENTION = "roll_mismatch"
_ATTENTION: ContextVar[tuple[Edits, Edits] | None] = ContextVar(
    "edits of attention, with and without a window", default=None
)
KINDS = {
    "vision": r"visual|vision|projector|image_newline",
    "head": r"(lm_head|embed_out)$",
    "embedding": r"(embed_tokens|wte|embed_in)$",
    "rope": r"rotary_emb$",
    "attention": r"(o_proj|out_proj|c_proj):input$",
    "activation": r"(down_proj:input|act_fn)$",
    "router": r"(mlp\.gate|router|mlp\.experts)$",
    "norm": r"(norm|ln_1|ln_2|ln_f)$",
}
"""Kind of a point of the model, by its name; the first that fits. All other modules are of kind `linear`."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """A sequence whose tokens from `begin` are compared."""

    tokens: TokenIds
    begin: int
    media: tuple[Media, ...] = ()
    experts: RoutedExperts | None = None
    """Experts that the engine chose, if it returns them."""


@dataclass(slots=True, kw_only=True)
class Edits:
    """Changes of the reference; by default none."""

    dropped: int = 0
    """Tokens that the model does not see at the start of the prompt."""
    num_visible: int | None = None
    """Largest number of prompt tokens that the model sees, the last ones."""
    prepended: tuple[int, ...] = ()
    cut: int = 0
    """Tokens that the model does not see at the end of the prompt."""
    restarted: bool = False
    """Positions count from 0 again at the response."""
    jump: int = 0
    """Added to the positions of the response."""
    offset: int = 0
    """Added to every position."""
    computed_in: dict[str, torch.dtype] = field(default_factory=dict)
    """Dtype in which the modules of a kind compute, or of another part: `all` is the whole model. Parts are the keys
    and values `kv`, the `softmax` of attention, its `probabilities` alone, rope's `angles` from frequencies in the
    dtype, rope's `products` of position and frequency, and `logprobs`."""
    window: int | None = None
    """Tokens to which each token attends, in layers with a window, or in all if no layer has one."""
    scale: float = 1.0
    """Factor on attention scores."""
    rope_base: float = 1.0
    """Exponent on the rope frequencies: log of the base over log of the model's base."""
    rope_factor: float = 1.0
    """Divisor of the rope frequencies: linear scaling."""
    epsilon: float | None = None
    """Epsilon of the norms."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Other values of parameters, by name."""
    rounded: torch.dtype | str | None = None
    """One of `FORMATS`, to which all matrices are rounded."""
    attention_softcap: float | None = None
    pixels: str = ""
    """Other pixels of images: `zeros` after the processor, `black`, `white`, or `reversed` images."""
    text_positions: str = ""
    """Positions that count tokens, as those of text: of `all` tokens, or of the `response` after images."""
    temperature: float | None = None
    """Temperature of the logprobs, instead of that of the run."""
    softcap: float = 0.0
    processed: bool = False
    """Logprobs after penalty, top-k, top-p and min-p."""
    filters: dict[str, float] = field(default_factory=dict)
    """Other values of top-k, top-p and min-p, after which the logprobs are computed."""
    penalty: float = 1.0
    shift: int = 0
    """Tokens by which logprobs are late."""

    def model_key(self) -> str:
        """Equal for edits with equal logits."""
        ours = ("temperature", "processed", "filters", "penalty", "shift", "weights")
        parts = {name: getattr(self, name) for name in self.__slots__ if name not in ours}
        return repr(parts) + repr({name: id(tensor) for name, tensor in self.weights.items()})


class Reference:
    """A float32 copy of the trainer's model."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], device: str = "cpu") -> None:
        """Load the model of `spec` and give it `weights`, which may lack tied parameters."""
        plain = replace(spec, dtype="fp32", lora=None, router_replay=False, gradient_checkpointing=False)
        self.model: Any = load_model(plain, device=device).requires_grad_(False).eval()
        self.parameters = dict(self.model.named_parameters())
        self.initial = {
            name: parameter.clone()
            for name, parameter in self.parameters.items()
            if name in weights and not torch.equal(parameter, weights[name].to(parameter))
        }
        """Values of the spec's model that differ from the trainer's."""
        for name, tensor in weights.items():
            if name in self.parameters:
                self.parameters[name].copy_(tensor)
        self.kinds = {name: kind_of(name) for name, _ in self.model.named_modules()}
        self.base = float(_rope_base(self.model.config))
        self.edits_attention = _use_attention(self.model)
        """False if the architecture has an attention of its own, which edits do not reach."""
        self._reader: Any = image_reader(self.model, plain)
        self._has_windows = any(getattr(module, "sliding_window", None) for module in self.model.modules())
        self._cached: dict[tuple[Any, ...], list[Tensor]] = {}

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids that stand for images; empty if the model has no image encoder, or no processor."""
        return () if self._reader is None else (self._reader.processor.image_token_id,)

    def tied_head(self) -> dict[str, Tensor]:
        """The embedding as head, by the head's name; empty if it is already, or cannot be."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
            return {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {names[id(head.weight)]: embedding.weight.detach().clone()}

    def with_adapter_scale(self, edits: Edits, factor: float) -> Edits:
        """The distance of the weights to the spec's model, times `factor`."""
        scaled = {name: old + factor * (self.parameters[name] - old) for name, old in self.initial.items()}
        return replace(edits, weights={**edits.weights, **scaled})

    def merged(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the spec's model plus B A of `adapters`, if they are not the exported ones."""
        merged = {}
        for name, factor in adapters.items():
            path, _, side = name.rpartition(".lora_")
            if side.startswith("A") and (weight := f"{path}.weight") in self.parameters:
                product = adapters[f"{path}.lora_B.weight"].float() @ factor.float()
                base = self.initial[weight] if weight in self.initial else self.parameters[weight]
                merged[weight] = base + product.to(base)
        return {name: new for name, new in merged.items() if not torch.allclose(new, self.parameters[name], atol=1e-5)}

    def logprobs(
        self, sequences: Sequence[ScoredTokens], params: SamplingParams, edits: Edits | None = None
    ) -> list[Floats]:
        """Logprobs of the compared tokens of each sequence, `[R]` each."""
        edits = edits or Edits()
        # A cap of logits is part of the model if the model has one.
        inside, after = edits, replace(edits, softcap=0.0)
        if self.caps_logits() is None:
            inside, after = after, edits
        key = (inside.model_key(), *((sequence.tokens.tobytes(), sequence.begin) for sequence in sequences))
        if key not in self._cached:
            self._cached = {key: self._logits(sequences, inside)} | dict(list(self._cached.items())[:1])
        return [
            _processed(logits_RV, sequence, params, after)
            for logits_RV, sequence in zip(self._cached[key], sequences, strict=True)
        ]

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[ScoredTokens], edits: Edits) -> list[Tensor]:
        """Logits before each compared token, `[R, V]` each: one padded pass, or one a sequence if any has images."""
        alone = any(sequence.media for sequence in sequences)
        results: list[Tensor] = []
        with self._edited(edits):
            for group in [[sequence] for sequence in sequences] if alone else [sequences]:
                inputs, spans = self._inputs(group, edits)
                logits = self.model(**inputs, use_cache=False).logits
                results += [logits[i, begin - 1 : end - 1].float().cpu() for i, (begin, end) in enumerate(spans)]
        return results

    def _inputs(
        self, sequences: Sequence[ScoredTokens], edits: Edits
    ) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        """Arguments of the model, and the compared tokens of each row. One with images is alone, and not truncated."""
        rows, spans = [], []
        for sequence in sequences:
            drop = max(edits.dropped, 0 if edits.num_visible is None else sequence.begin - edits.num_visible)
            drop = 0 if sequence.media else min(drop, sequence.begin - 1)
            seen = np.delete(sequence.tokens, np.arange(max(drop, sequence.begin - edits.cut), sequence.begin))[drop:]
            rows.append(np.concatenate([np.asarray(edits.prepended, np.int64), seen]))
            spans.append((sequence.begin + len(rows[-1]) - len(sequence.tokens), len(rows[-1])))
        width = max(map(len, rows))
        tokens = torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
        positions = torch.arange(width).expand(len(rows), -1) + edits.offset
        # The mask always: without one, transformers reads a jump of positions as the start of another sequence.
        inputs = {"input_ids": tokens, "attention_mask": torch.arange(width) < torch.tensor(spans)[:, 1:]}
        if media := sequences[0].media:
            inputs |= self._images(tokens, media, edits.pixels)
        begins = torch.tensor(spans)[:, :1]
        if not media or edits.text_positions == "all":
            moved = positions - begins if edits.restarted else positions + edits.jump
            inputs["position_ids"] = torch.where(positions >= begins, moved, positions)
        elif edits.text_positions:
            of_images = self._reader.read(tokens[0], [width], (media,), ("",)).positions_AT
            if of_images is not None:
                inputs["position_ids"] = torch.where(positions >= begins, positions, of_images.cpu()[:, None])
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}, spans

    def _images(self, tokens: Tensor, media: tuple[Media, ...], pixels: str) -> dict[str, Tensor]:
        """Arrays of the images of a sequence, and types of its tokens if the model reads these."""
        if pixels == "reversed" and len({(image.width, image.height) for image in media}) == 1:
            media = media[::-1]
        if pixels in ("black", "white"):
            media = tuple(_plain_image(image, pixels) for image in media)
        arrays = {name: torch.tensor(array) for name, array in self._reader.processor.inputs(media).items()}
        if pixels == "zeros":
            arrays |= {name: array.zero_() for name, array in arrays.items() if array.is_floating_point()}
        types = (tokens == self._reader.processor.image_token_id).long()
        known = inspect.signature(self.model.forward).parameters
        arrays |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), types)
        return {name: array for name, array in arrays.items() if name in known}

    @contextmanager
    def _edited(self, edits: Edits) -> Iterator[None]:
        """The model with `edits`, during the context."""
        everywhere = replace(edits, window=None if self._has_windows else edits.window)
        token = _ATTENTION.set((edits, everywhere))
        saved = {name: parameter.data for name, parameter in self.parameters.items()}
        with ExitStack() as stack:
            stack.callback(_ATTENTION.reset, token)
            for name, data in saved.items():
                stack.callback(setattr, self.parameters[name], "data", data)
            for name, tensor in edits.weights.items():
                self.parameters[name].data = tensor.to(self.parameters[name])
            if edits.rounded is not None:
                for name, parameter in self.parameters.items():
                    parameter.data = rounded(name, parameter.data, edits.rounded)
            if edits.softcap and (config := self.caps_logits()) is not None:
                _set(stack, config, "final_logit_softcapping", edits.softcap)
            for name, module in self.model.named_modules():
                kind = "all" if name == "" else self.kinds[name]
                if kind in edits.computed_in and (kind == "all" or not any(module.children())):
                    stack.enter_context(_computed_in(module, edits.computed_in[kind], buffers=kind != "rope"))
                if kind == "rope" and (dtype := edits.computed_in.get("angles")) is not None:
                    stack.enter_context(_computed_in(module, dtype))
                if kind == "rope" and (dtype := edits.computed_in.get("products")) is not None:
                    hook = module.register_forward_hook(partial(_multiplied_in, dtype), with_kwargs=True)
                    stack.callback(hook.remove)
                if edits.epsilon is not None and "norm" in type(module).__name__.lower():
                    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
                    _set(stack, module, name, edits.epsilon)
                if hasattr(module, "inv_freq") and (edits.rope_base != 1 or edits.rope_factor != 1):
                    _set(stack, module, "inv_freq", module.inv_freq**edits.rope_base / edits.rope_factor)
            yield

    def caps_logits(self) -> Any:
        """The config that has the cap of logits; None if the model caps none."""
        config = self.model.config.get_text_config()
        return config if getattr(config, "final_logit_softcapping", None) else None

    @torch.inference_mode()
    def patched(
        self, sequence: ScoredTokens, activations: Mapping[str, Tensor], edits: Edits
    ) -> list[tuple[str, Floats]]:
        """Logprobs at temperature 1 if every module up to a point has the activations of another side, by point.

        Points are in the order in which the model runs. The first result has no foreign activation.
        """
        order = [""]
        foreign: set[str] = set()

        def visit(name: str, tensor: Tensor) -> Tensor:
            if name not in activations or activations[name].numel() != tensor.numel():
                return tensor
            if name not in order:
                order.append(name)
            return activations[name].to(tensor).view_as(tensor) if name in foreign else tensor

        inputs, _ = self._inputs([sequence], Edits())
        tokens = inputs["input_ids"]
        results: list[tuple[str, Floats]] = []
        with self._edited(edits), visited(self.model, visit):
            for index in range(1 + len(activations)):
                if index >= len(order):
                    break
                foreign.update(order[: index + 1])
                logits = self.model(**inputs, use_cache=False).logits[0, :-1].float()
                following = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
                results.append((order[index], following[sequence.begin - 1 :].cpu().numpy()))
        return results


def kind_of(name: str) -> str:
    """Kind of a point, see `KINDS`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "linear")


def rounded(name: str, tensor: Tensor, form: torch.dtype | str) -> Tensor:
    """Values in float32 that one of `FORMATS` has. fp8 has matrices alone."""
    if isinstance(form, torch.dtype):
        return tensor.to(form).float() if tensor.ndim > 1 or form is not FP8 else tensor
    if tensor.ndim != 2 or not is_layers_weight(name):
        return tensor
    size = FP8_SCALED[form]
    values, scale = quantise_blocks(tensor) if size > 1 else quantise_rows(tensor if size else tensor.view(1, -1))
    if size > 1:
        scale = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(tensor), : tensor.shape[1]]
    return (values.float() * scale).view_as(tensor)


def _plain_image(image: Media, colour: str) -> Media:
    from PIL import Image

    from roll_core.data.media import image_media

    return image_media(Image.new("RGB", (image.width, image.height), colour))


def _rope_base(config: Any) -> float:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def _computed_in(module: nn.Module, dtype: torch.dtype, *, buffers: bool = True) -> Iterator[None]:
    """The module computes in `dtype`, from inputs and with weights in it, and `buffers`; its output is float32."""

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(item, to) for item in value)
        return value.to(to) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    saved = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = cast(tensor.data, dtype)
    hooks = [
        module.register_forward_pre_hook(lambda _, args: cast(args, dtype)),
        module.register_forward_hook(lambda _, args, output: cast(output, torch.float32)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensor, data in zip(tensors, saved, strict=True):
            tensor.data = data


def _multiplied_in(dtype: torch.dtype, module: Any, args: Any, named: Any, output: Any) -> Any:
    """Cosines and sines of angles whose products of position and frequency are rounded; for positions of one axis."""
    positions = named["position_ids"] if "position_ids" in named else args[1]
    if positions.ndim != 2 or not hasattr(module, "inv_freq"):
        return output
    angles = (positions[..., None].to(dtype) * module.inv_freq.to(dtype)).float().repeat(1, 1, 2)
    scaling = getattr(module, "attention_scaling", 1.0)
    return angles.cos() * scaling, angles.sin() * scaling


# -- attention ---------------------------------------------------------------------------------------------------------


def _use_attention(model: Any) -> bool:
    """Let the model attend with `_attention`. False if its architecture has an attention of its own."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        model.set_attn_implementation(ATTENTION)
    except (ValueError, ImportError):
        return False
    return True


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention in plain operations, with the edits of the current pass; `[N, H, L, D]` to `[N, L, H, D]`."""
    windowed, everywhere = _ATTENTION.get() or (Edits(), Edits())
    edits = windowed if more.get("sliding_window") else everywhere
    dtypes = edits.computed_in
    if (dtype := dtypes.get("kv")) is not None:
        key, value = key.to(dtype).to(key.dtype), value.to(dtype).to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling * edits.scale)
    if (softcap := edits.attention_softcap or more.get("softcap")) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if edits.window is not None and scores.shape[2] == scores.shape[3]:
        # Instead of the mask, which may have a smaller window; padding is at the end, where no token attends to it.
        distance = torch.arange(scores.shape[2])[:, None] - torch.arange(scores.shape[3])
        outside = (distance >= edits.window) | (distance < 0)
        scores = scores.masked_fill(outside.to(scores.device), torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    sinks = more.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], -1)
    weights = torch.softmax(scores.to(dtypes.get("softmax", scores.dtype)), -1)
    weights = weights.to(dtypes.get("probabilities", query.dtype)).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


# -- sampling ----------------------------------------------------------------------------------------------------------


def _processed(logits_RV: Tensor, sequence: ScoredTokens, params: SamplingParams, edits: Edits) -> Floats:
    """Logprobs of the compared tokens under the distribution that the edits describe."""
    temperature = params.temperature or 1.0
    chosen = torch.from_numpy(sequence.tokens[sequence.begin :])[:, None]
    scores = logits_RV.clone()
    penalty = edits.penalty * (params.repetition_penalty if edits.processed else 1.0)
    if penalty != 1:
        penalise = RepetitionPenaltyLogitsProcessor(float(penalty))
        for index in range(len(scores)):
            seen = torch.from_numpy(sequence.tokens[None, : sequence.begin + index])
            scores[index] = penalise(seen, scores[index : index + 1])[0]
    if edits.softcap:
        scores = torch.tanh(scores / edits.softcap) * edits.softcap
    scores = scores / (temperature if edits.temperature is None else edits.temperature)
    if edits.processed or edits.filters:
        others: dict[str, Any] = {} if edits.processed else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        scores = _truncated(scores, replace(params, **{**others, **edits.filters}))
    logprobs = torch.log_softmax(scores.to(edits.computed_in.get("logprobs", torch.float32)), -1).float()
    logprobs_R: Floats = logprobs.gather(1, chosen)[:, 0].numpy()
    return np.roll(logprobs_R, edits.shift) if edits.shift else logprobs_R


def _truncated(scores_RV: Tensor, params: SamplingParams) -> Tensor:
    """Scores without the tokens that top-k, top-p and min-p exclude."""
    warpers: list[Any] = [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in warpers:
        scores_RV = warper(None, scores_RV)
    return scores_RV
