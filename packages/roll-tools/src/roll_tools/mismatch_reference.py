"""The reference of `roll-core doctor mismatch`: transformers' own model in float32 with the trainer's weights.

Trainer and engine are each compared with it, so that the doctor knows which side deviates. An edit changes one thing
in the reference: a temperature, the rope base, the dtype of a norm. The edit that reproduces a side's logprobs is the
cause of that side's gap.

    prompt and positions ──► model, built with other keys, weights, dtypes ──► logits ──► sampling ──► logprobs

L tokens of a sequence, R response tokens, V vocabulary, W width of an activation.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from roll_core.errors import ModelError
from roll_core.spec.fp8 import BLOCK, is_layers_weight, quantise_blocks, quantise_rows
from roll_modeling.activations import visited
from roll_modeling.images import image_reader
from roll_modeling.model import load_model, parameters_on_meta, quiet
from roll_modeling.model_table import NUMBER_OF_EXPERTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Floats, Media, RoutedExperts, SamplingParams, TokenIds

    Visit = Callable[[str, Tensor], Tensor]

Edits = Mapping[str, Any]
"""Changes of the reference by key; none if empty.

| key | value |
|---|---|
| `prompt.last`, `.first`, `.dropped`, `.cut`, `.prepended` | see `PROMPTS` |
| `positions` | pair of a name in `POSITIONS` and its number |
| `pixels`, `text_positions` | see `Reference._images`, `Reference._inputs` |
| `config.<key>`, `config.<key>.<key>` | another value of the key |
| `weights.<any>` | other values of parameters by name |
| `adapter` | factor on the distance of the weights to those of the spec's model |
| `rounded` | one of `FORMATS`, to which all matrices are rounded |
| `dtype.<kind>` | dtype in which modules of a kind compute; `all` is the whole model |
| `dtype.kv`, `.softmax`, `.probabilities` | dtype of a part of attention |
| `dtype.angles`, `.products`, `.logprobs` | dtype of rope's frequencies, their products with positions, or logprobs |
| `inputs` | one of `ROWS`, to which inputs of the layers' linear modules are rounded |
| `skipped` | names of modules whose output is their input |
| `window` | tokens to which each token attends, in layers with a window, or in all if no layer has one |
| `scale` | factor on attention scores |
| `temperature`, `top_k`, `top_p`, `min_p` | instead of the run's |
| `processed` | logprobs after the run's penalty, top-k, top-p and min-p |
| `repetition`, `presence`, `frequency` | penalty of tokens that occurred before, the latter two in the response |
| `bias` | added to the logits of token ids |
| `argmax` | logprob of the most likely token instead of the sampled one |
| `shift` | tokens by which logprobs are late |
"""
LOGITS = (
    *("temperature", "top_k", "top_p", "min_p", "processed", "repetition", "presence", "frequency", "bias"),
    *("argmax", "shift", "dtype.logprobs"),
)
"""Keys of edits that leave the logits as they are."""
FP8 = torch.float8_e4m3fn
SCALED = {f"{name} {part}": (name, size) for name in ("fp8", "int8") for part, size in (("tensors", 0), ("rows", 1))}
SCALED |= {"fp8 blocks": ("fp8", BLOCK)}
"""Formats of the matrices of layers with a scale for each tensor, row or block of 128 × 128."""
FORMATS: tuple[torch.dtype | str, ...] = (torch.bfloat16, torch.float16, FP8, torch.float8_e5m2, *SCALED)
"""Formats of weights."""
ROWS = ("fp8 rows", "int8 rows")
"""Formats of activations, with a scale for each token."""
PROMPTS: Mapping[str, Callable[[Any, Any], Any]] = {
    "prompt.last": lambda ids, number: ids[-number:],
    "prompt.first": lambda ids, number: ids[:number],
    "prompt.dropped": lambda ids, number: ids[number:],
    "prompt.cut": lambda ids, number: ids[:-number],
    "prompt.doubled": lambda ids, number: np.append(ids[:number], ids),
    "prompt.prepended": lambda ids, others: np.append(np.asarray(others, np.int64), ids),
}
"""Prompt tokens that the model sees."""
CUTS = ("prompt.last", "prompt.first", "prompt.dropped")
"""Keys that may remove tokens of images."""
POSITIONS: Mapping[str, Callable[[Any, Any, int], Any]] = {
    "moved by": lambda positions, begin, number: positions + number,
    "of the response moved by": lambda positions, begin, number: positions + number * (positions >= begin),
    "of the response count from": lambda positions, begin, number: torch.where(
        positions >= begin, positions - begin + number, positions
    ),
    "of the response stay": lambda positions, begin, number: positions.minimum(begin + number),
    "at most": lambda positions, begin, number: positions.clamp(max=number),
}
"""Positions of tokens, from those that count from 0, and that of the first response token."""
ATTENTION = "roll_mismatch"
_ATTENTION: ContextVar[tuple[Edits, bool]] = ContextVar(
    "edits of attention, and whether some layers alone have windows", default=({}, False)
)
KINDS = {
    "vision": r"visual|vision|projector|image_newline",
    "head": r"(lm_head|embed_out)$",
    "embedding": r"(embed_tokens|wte|embed_in)$",
    "rope": r"rotary_emb$",
    "attention": r"(o_proj|out_proj|c_proj):input$",
    "activation": r"(down_proj:input|act_fn)$",
    "router": r"(mlp\.gate|router|mlp\.experts|shared_expert_gate)$",
    "norm": r"(norm|ln_1|ln_2|ln_f)$",
    "residual": r"\.(layers|h)\.\d+$",
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
        self.edits_attention = _use_attention(self.model)
        """False if the architecture has an attention of its own, which edits do not reach."""
        self._reader: Any = image_reader(self.model, plain)
        self._variants: dict[str, Any] = {}
        self._cached: dict[tuple[Any, ...], list[Tensor]] = {}

    @property
    def config(self) -> Any:
        """The config of the language model."""
        return self.model.config.get_text_config()

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 if it has none."""
        return max(getattr(self.config, key, None) or 0 for key in NUMBER_OF_EXPERTS)

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids that stand for images; empty if the model has no image encoder, or no processor."""
        return () if self._reader is None else (self._reader.processor.image_token_id,)

    def logprobs(
        self, sequences: Sequence[ScoredTokens], params: SamplingParams, edits: Edits | None = None
    ) -> list[Floats]:
        """Logprobs of the compared tokens of each sequence, `[R]` each. Raises `ModelError` if the model cannot be
        built with an edit's key."""
        edits, logits = edits or {}, self.logits(sequences, edits or {})
        return [_sampled(*pair, params, edits) for pair in zip(logits, sequences, strict=True)]

    def logits(self, sequences: Sequence[ScoredTokens], edits: Edits) -> list[Tensor]:
        """Logits before each compared token, `[R, V]` each: one padded pass, or one a sequence if any has images."""
        inside = {key: value for key, value in edits.items() if key not in LOGITS}
        for name in (name for name in inside if name.startswith("weights.")):
            inside[name] = {parameter: id(tensor) for parameter, tensor in inside[name].items()}
        label = repr(sorted(inside.items()))
        key = (label, *((sequence.tokens.tobytes(), sequence.begin) for sequence in sequences))
        if key not in self._cached:
            self._cached = {key: self._logits(sequences, edits)} | dict(list(self._cached.items())[:1])
        return self._cached[key]

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[ScoredTokens], edits: Edits) -> list[Tensor]:
        alone = any(sequence.media for sequence in sequences)
        results: list[Tensor] = []
        with self._edited(edits) as model:
            for group in [[sequence] for sequence in sequences] if alone else [sequences]:
                inputs, spans = self._inputs(group, edits)
                logits = model(**inputs, use_cache=False).logits
                results += [logits[i, begin - 1 : end - 1].float().cpu() for i, (begin, end) in enumerate(spans)]
        return results

    @torch.inference_mode()
    def visited(self, sequence: ScoredTokens, edits: Edits, visit: Visit) -> Floats:
        """Logprobs at temperature 1 if each activation is replaced by `visit(name, activation)`."""
        inputs, _ = self._inputs([sequence], {})
        with self._edited(edits) as model, visited(model, visit):
            logits = model(**inputs, use_cache=False).logits[0, :-1].float()
        following = torch.log_softmax(logits, -1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        logprobs_R: Floats = following[sequence.begin - 1 :].cpu().numpy()
        return logprobs_R

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _inputs(
        self, sequences: Sequence[ScoredTokens], edits: Edits
    ) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        """Arguments of the model, and the compared tokens of each row. One with images is alone, and not truncated."""
        rows, spans = [], []
        for sequence in sequences:
            prompt, response = np.split(sequence.tokens, [sequence.begin])
            for key in edits.keys() & PROMPTS.keys():
                seen = PROMPTS[key](prompt, edits[key])
                prompt = seen if len(seen) and not (sequence.media and key in CUTS) else prompt
            rows.append(np.concatenate([prompt, response]))
            spans.append((len(prompt), len(rows[-1])))
        width = max(map(len, rows))
        tokens = torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
        # The mask always: without one, transformers reads a jump of positions as the start of another sequence.
        inputs = {"input_ids": tokens, "attention_mask": torch.arange(width) < torch.tensor(spans)[:, 1:]}
        if media := sequences[0].media:
            inputs |= self._images(tokens, media, edits.get("pixels", ""))
        positions, begins = torch.arange(width).expand(len(rows), -1), torch.tensor(spans)[:, :1]
        as_text = edits.get("text_positions", "")
        if not media or as_text == "all":
            rule, number = edits.get("positions", ("moved by", 0))
            inputs["position_ids"] = POSITIONS[rule](positions, begins, number)
        elif as_text:
            of_images = self._reader.read(tokens[0], [width], (media,), ("",)).positions_AT
            if of_images is not None:
                inputs["position_ids"] = torch.where(positions >= begins, positions, of_images.cpu()[:, None])
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}, spans

    def _images(self, tokens: Tensor, media: tuple[Media, ...], pixels: str) -> dict[str, Tensor]:
        """Arrays of the images of a sequence, and types of its tokens if the model reads these.

        `pixels` are `zeros` after the processor, `black`, `white`, or `reversed` images.
        """
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

    # -- the model -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _edited(self, edits: Edits) -> Iterator[Any]:
        """The model with `edits`, during the context."""
        model = self._variant({key.removeprefix("config."): edits[key] for key in edits if key.startswith("config.")})
        parameters = dict(model.named_parameters())
        windows = any(getattr(module, "sliding_window", None) for module in model.modules())
        with ExitStack() as stack:
            stack.callback(_ATTENTION.reset, _ATTENTION.set((edits, windows)))
            for parameter in parameters.values():
                stack.callback(setattr, parameter, "data", parameter.data)
            for key in (key for key in edits if key.startswith("weights.")):
                # All before any: values may be those of other parameters.
                values = {name: tensor.detach() for name, tensor in edits[key].items() if name in parameters}
                for name, tensor in values.items():
                    parameters[name].data = tensor.to(parameters[name])
            if "adapter" in edits:
                for name, base in self.initial.items():
                    parameters[name].data = base + edits["adapter"] * (self.parameters[name] - base)
            if "rounded" in edits:
                for name, parameter in parameters.items():
                    parameter.data = rounded(name, parameter.data, edits["rounded"])
            for name, module in model.named_modules():
                for change in _changes(name, module, edits):
                    stack.enter_context(change)
            yield model

    def _variant(self, keys: Mapping[str, Any]) -> Any:
        """The model built with other values of config keys, with the parameters of this one."""
        if not keys:
            return self.model
        if (label := repr(sorted(keys.items()))) not in self._variants:
            config = copy.deepcopy(self.model.config)
            try:
                for path, value in keys.items():
                    _set_key(config.get_text_config(), path, value)
                with quiet(), parameters_on_meta():
                    model = type(self.model)._from_config(config, dtype=torch.float32)
                model.load_state_dict(self.model.state_dict(keep_vars=True), strict=False, assign=True)
                model.tie_weights()
            except Exception as error:  # transformers refuses values and sizes in many ways
                raise ModelError(f"{label}: {error}") from error
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ModelError(f"{label} adds parameters")
            self._variants = {label: model.to(self.model.device).requires_grad_(False).eval()}
        return self._variants[label]


@cache
def kind_of(name: str) -> str:
    """Kind of a point, see `KINDS`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "linear")


def rounded(name: str, tensor: Tensor, form: torch.dtype | str) -> Tensor:
    """Values in float32 that one of `FORMATS` has. fp8 has matrices alone."""
    if isinstance(form, torch.dtype):
        return tensor.to(form).float() if tensor.ndim > 1 or form.itemsize > 1 else tensor
    if tensor.ndim != 2 or not is_layers_weight(name):
        return tensor
    return scaled(tensor, form)


def scaled(tensor: Tensor, form: str) -> Tensor:
    """Values of a matrix in a format of `SCALED`."""
    number, size = SCALED[form]
    rows = tensor if size else tensor.reshape(1, -1)
    if number == "int8":
        scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return ((rows / scale).round() * scale).view_as(tensor)
    values, scale = quantise_blocks(rows) if size > 1 else quantise_rows(rows)
    if size > 1:
        scale = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(tensor), : tensor.shape[1]]
    return (values.float() * scale).view_as(tensor)


def _set_key(config: Any, path: str, value: Any) -> None:
    """Set a key of a config, or of a dictionary in it."""
    name, *inner = path.split(".")
    if inner:
        part = value_of_key = copy.deepcopy(getattr(config, name))
        for step in inner[:-1]:
            part = part[step]
        part[inner[-1]] = value
        value = value_of_key
    setattr(config, name, value)


def _plain_image(image: Media, colour: str) -> Media:
    from PIL import Image

    from roll_core.data.media import image_media

    return image_media(Image.new("RGB", (image.width, image.height), colour))


# -- modules -----------------------------------------------------------------------------------------------------------


def _changes(name: str, module: nn.Module, edits: Edits) -> Iterator[Any]:
    """Contexts in which a module is edited."""
    kind, leaf = kind_of(name) if name else "all", not any(module.children())
    if (dtype := edits.get(f"dtype.{kind}")) is not None and (leaf or kind == "all"):
        yield _computed_in(module, dtype, buffers=kind != "rope")
    if kind == "residual" and dtype is not None:
        yield _hooked(module, lambda _, args, output: output.to(dtype).to(output.dtype))
    if kind == "rope" and (dtype := edits.get("dtype.angles")) is not None:
        yield _computed_in(module, dtype)
    if kind == "rope" and (dtype := edits.get("dtype.products")) is not None:
        yield _hooked(module, partial(_multiplied_in, dtype), with_kwargs=True)
    if "inputs" in edits and kind == "linear" and isinstance(module, torch.nn.Linear):
        yield _hooked(module, lambda _, args: (_rows(args[0], edits["inputs"]), *args[1:]), before=True)
    if name.rpartition(".")[2] in edits.get("skipped", ()):
        yield _hooked(module, lambda _, args, output: args[0])


@contextmanager
def _hooked(module: nn.Module, hook: Any, *, before: bool = False, **options: bool) -> Iterator[None]:
    register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def _rows(tensor: Tensor, form: str) -> Tensor:
    return scaled(tensor.flatten(0, -2), form).view_as(tensor)


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
    try:
        with (
            _hooked(module, lambda _, args: cast(args, dtype), before=True),
            _hooked(module, lambda _, args, output: cast(output, torch.float32)),
        ):
            yield
    finally:
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
    edits, windows = _ATTENTION.get()
    window = edits.get("window") if more.get("sliding_window") or not windows else None
    if (dtype := edits.get("dtype.kv")) is not None:
        key, value = key.to(dtype).to(key.dtype), value.to(dtype).to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling * edits.get("scale", 1.0))
    if (softcap := more.get("softcap")) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if window is not None and scores.shape[2] == scores.shape[3]:
        # Instead of the mask, which may have a smaller window; padding is at the end, where no token attends to it.
        distance = torch.arange(scores.shape[2])[:, None] - torch.arange(scores.shape[3])
        outside = (distance >= window) | (distance < 0)
        scores = scores.masked_fill(outside.to(scores.device), torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    sinks = more.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], -1)
    weights = torch.softmax(scores.to(edits.get("dtype.softmax", scores.dtype)), -1)
    weights = weights.to(edits.get("dtype.probabilities", query.dtype)).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sampled(logits_RV: Tensor, sequence: ScoredTokens, params: SamplingParams, edits: Edits) -> Floats:
    """Logprobs of the compared tokens under the distribution that the edits describe."""
    chosen = torch.from_numpy(sequence.tokens[sequence.begin :])[:, None]
    processed = edits.get("processed", False)
    scores = logits_RV.clone()
    repetition = edits.get("repetition", 1.0) * (params.repetition_penalty if processed else 1.0)
    if repetition != 1:
        penalise = RepetitionPenaltyLogitsProcessor(float(repetition))
        for index in range(len(scores)):
            seen = torch.from_numpy(sequence.tokens[None, : sequence.begin + index])
            scores[index] = penalise(seen, scores[index : index + 1])[0]
    if edits.get("presence") or edits.get("frequency"):
        counts = torch.zeros_like(scores)
        counts[1:].scatter_(1, chosen[:-1], 1.0)
        counts = counts.cumsum(0)
        scores -= edits.get("frequency", 0.0) * counts + edits.get("presence", 0.0) * (counts > 0)
    for token, bias in edits.get("bias", {}).items():
        scores[:, token] += bias
    scores = scores / edits.get("temperature", params.temperature or 1.0)
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if processed:
        filters = {name: getattr(params, name) for name in filters}
    scores = _truncated(scores, **{name: edits.get(name, value) for name, value in filters.items()})
    logprobs = torch.log_softmax(scores.to(edits.get("dtype.logprobs", torch.float32)), -1).float()
    logprobs_R: Floats = (logprobs.amax(1) if edits.get("argmax") else logprobs.gather(1, chosen)[:, 0]).numpy()
    return np.roll(logprobs_R, edits.get("shift", 0))


def _truncated(scores_RV: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Scores without the tokens that top-k, top-p and min-p exclude."""
    warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores_RV = warper(None, scores_RV)
    return scores_RV
