"""Edits of the reference that `roll-core doctor mismatch` tries: a row for each cause, and the search of values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from roll_core.runtime.records import mismatch as records
from roll_tools.mismatch_reference import FORMATS, FP8, ROWS, Edits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import Floats, SamplingParams
    from roll_tools.mismatch_reference import Reference, ScoredTokens

LOW = (torch.bfloat16, torch.float16)
MIN_SHARE = 0.15
"""Smallest share of a side's gap that an edit must explain."""
REFINEMENTS = 12
BOTH = "equal on both sides"
FIXES = {
    **records.FIXES,
    "sampling.top_p": "actor_infer.generating_args.top_p: 1",
    "sampling.top_k": "actor_infer.generating_args.top_k: 0",
    "sampling.min_p": "actor_infer.generating_args.min_p: 0",
    "sampling.logit_bias": "min_new_tokens: 0, and no logit bias or banned tokens in the engine",
    "sampling.argmax_logprobs": "the engine's plugin: the logprob of the sampled token, not of the first of the list",
    "inputs.special_tokens": "prompts that begin with the special token once: the template, or add_special_tokens",
    "inputs.template": "data.template, or the engine's own: both sides get the same token ids",
    "inputs.images": "the images and the encoder of both sides: processor, dtype, order",
    "inputs.positions": "positions that count through prompt and response from 0, as far as the longest sequence",
    "inputs.image_pixels": "the image processor of both sides: preprocessor_config.json, pixel limits, order of images",
    "inputs.image_positions": "positions of image tokens by rows and columns (mrope) on both sides",
    "model.rope": f"model_config_kwargs.rope_parameters, {BOTH}; order of the units of heads (interleaved or not)",
    "model.sliding_window": f"model_config_kwargs.sliding_window, {BOTH}",
    "model.tied_head": "model_config_kwargs.tie_word_embeddings: false",
    "model.lora_scale": f"lora_alpha, lora_rank and use_rslora, {BOTH}",
    "model.lora_merge": "report to the trainer's plugin: it exports other weights than it computes with",
    "model.router_replay": "router_replay.mode: R3",
    "arithmetic.dtype": f"model_args.dtype, {BOTH}",
    "arithmetic.kv_dtype": "actor_infer.strategy_args.strategy_config: the KV cache in the model's dtype",
    "weights.exported": "report to the trainer's plugin: it exports other weights than it computes with",
    "weights.rounded": f"model_args.dtype, and the engine's quantization: {BOTH}",
    "engine.batch": "actor_infer.strategy_args.strategy_config.max_num_seqs: 1",
    "engine.prefix_cache": "actor_infer.strategy_args.strategy_config: prefix caching off (min_shared_prefix: 0)",
    "engine.stale_cache": "report to the engine's plugin: clear the prefix cache when weights change",
    "trainer.random": "dropout of the trainer: 0 while it scores; deterministic kernels",
    "trainer.packing": "the trainer's batches: infer_batch_size: 1, or packing off",
}
"""Smallest change for each cause, in keys of the config."""
OTHER_FIXES = {
    "sampling": f"the engine's defaults of sampling (generation_config.json): {{part}} {BOTH}",
    "model": f"the model's config and the engine's code: {{part}} {BOTH}",
    "weights": "report to the engine's plugin: it computes with other weights than it was sent",
    "engine": "compare the engine's code with transformers': {part}",
    "arithmetic": f"{{part}} in float32, or {BOTH}: compare both codes there",
}
"""The change for all other causes, by branch."""
KEYS = {
    "rope_scaling": "model.rope_scaling",
    "rope_parameters.factor": "model.rope_scaling",
    "rope": "model.rope",
    "partial_rotary": "model.rope",
    "tie_word": "model.tied_head",
    "window": "model.sliding_window",
    "layer_types": "model.sliding_window",
    "norm_eps": "model.norm_epsilon",
    "layer_norm_epsilon": "model.norm_epsilon",
    "final_logit_softcap": "model.logit_softcap",
    "attn_logit_softcap": "model.attention_softcap",
    "query_pre_attn": "model.attention_scale",
    "attention_multiplier": "model.attention_scale",
    "embedding_multiplier": "model.embedding_scale",
    "hidden_act": "model.activation",
    "topk": "model.router",
    "per_tok": "model.router",
    "routed_scaling": "model.router",
    "scoring_func": "model.router",
}
"""Cause by a part of the key of transformers' config; `model.config` for all others."""
SIZES = re.compile(r"^n_|num_|max_|size|dim|layers|token_id|range|dropout|rank|coef|step|loss")
"""Parts of the names of keys that change shapes, or nothing."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


def fix_of(name: str, key: str = "") -> str:
    """The change that removes a cause, of a model's `key` if it is one."""
    branch, _, part = name.partition(".")
    if key.startswith("config."):
        return f"model_config_kwargs.{key.removeprefix('config.')}, {BOTH}"
    return FIXES.get(name) or OTHER_FIXES[branch].format(part=part.replace("_", " "))


def cause_of(key: str) -> str:
    """Name of the cause if a key of transformers' config differs."""
    return next((name for part, name in KEYS.items() if part in key), "model.config")


@dataclass(frozen=True, slots=True)
class Experiment:
    """An edit of the reference with the values to try."""

    name: str
    kinds: str
    """Kinds of points at which it can begin; `any` is everywhere, `logits` after the model."""
    key: str
    """Key of the edit, see `Edits`."""
    values: tuple[Any, ...]
    refined: bool = False
    """Between the best value and its neighbours, the best one is searched."""

    def edit(self, edits: Edits, value: Any) -> Edits:
        """The edits with this one."""
        return {**edits, self.key: value}

    def described(self, value: Any) -> str:
        """Key and value."""
        if self.key.startswith("weights."):
            return f"{self.key.removeprefix('weights.')} ({len(value)} weights)"
        if isinstance(value, dict | list | tuple):
            value = ", ".join(map(str, value.items() if isinstance(value, dict) else value))
        return f"{self.key} {value:.4g}" if isinstance(value, float) else f"{self.key} {value}".replace("torch.", "")


def _grid(low: float, high: float, number: int) -> tuple[float, ...]:
    return tuple(float(value) for value in np.geomspace(low, high, number))


def experiments(
    reference: Reference, params: SamplingParams, sequences: Sequence[ScoredTokens], adapters: Mapping[str, Tensor]
) -> list[Experiment]:
    """The table of edits, for these sequences, and a trainer with these adapters."""
    temperature, config = params.temperature or 1.0, reference.config
    longest = max(len(sequence.tokens) for sequence in sequences)
    larger = {int(value) for value in np.geomspace(49, longest, 24)} if longest > 49 else set()
    lengths = (*range(1, min(longest, 48) + 1), *sorted(larger))
    special = {getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    first_tokens = tuple((token,) for token in sorted(token for token in special if isinstance(token, int)))
    jumps, penalties = (*range(-8, 0), *range(1, 9)), (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
    where, heads = "inputs embedding rope attention", "rope attention"
    rows: list[tuple[Any, ...]] = [
        ("sampling.temperature", "logits", "temperature", (1.0, *_grid(temperature / 4, 4 * temperature, 9)), True),
        ("sampling.processed_logprobs", "logits", "processed", (True,)),
        ("sampling.top_p", "logits", "top_p", (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), True),
        ("sampling.top_k", "logits", "top_k", (1, 2, 5, 10, 20, 50, 100, 200), True),
        ("sampling.min_p", "logits", "min_p", _grid(0.005, 0.5, 8), True),
        ("sampling.repetition_penalty", "logits", "repetition", _grid(0.5, 2, 8), True),
        ("sampling.presence_penalty", "logits", "presence", penalties, True),
        ("sampling.frequency_penalty", "logits", "frequency", penalties, True),
        ("sampling.argmax_logprobs", "logits", "argmax", (True,)),
        ("inputs.shift", "logits", "shift", (1, -1)),
        ("arithmetic.logprobs", "logits", "dtype.logprobs", LOW),
        ("arithmetic.head", "head", "dtype.head", LOW),
        ("arithmetic.norm", "norm", "dtype.norm", LOW),
        ("arithmetic.residual", "residual norm", "dtype.residual", LOW),
        ("arithmetic.rope", heads, "dtype.rope", LOW),
        ("arithmetic.rope", heads, "dtype.angles", LOW),
        ("arithmetic.rope", heads, "dtype.products", LOW),
        ("arithmetic.router", "router", "dtype.router", LOW),
        ("arithmetic.softmax", "attention", "dtype.softmax", LOW),
        ("arithmetic.softmax", "attention", "dtype.probabilities", LOW),
        ("arithmetic.kv_dtype", "attention", "dtype.kv", (*LOW, FP8, torch.float8_e5m2)),
        ("arithmetic.linear", "linear", "dtype.linear", LOW),
        ("arithmetic.linear", "linear", "inputs", ROWS),
        ("arithmetic.dtype", "any", "dtype.all", LOW),
        ("weights.rounded", "any", "rounded", FORMATS),
        ("model.attention_scale", "attention", "scale", _grid(0.125, 8, 13), True),
        ("model.sliding_window", "attention", "window", lengths, True),
        ("inputs.truncation", "inputs embedding", "prompt.last", lengths, True),
        ("inputs.truncation", "inputs embedding", "prompt.first", lengths, True),
        ("inputs.special_tokens", "inputs embedding", "prompt.prepended", first_tokens),
        ("inputs.special_tokens", "inputs embedding", "prompt.dropped", (1,)),
        ("inputs.special_tokens", "inputs embedding", "prompt.doubled", (1,)),
        ("inputs.template", "inputs embedding", "prompt.cut", (1, 2, 3, 4)),
        ("inputs.positions", where, "positions", (("of the response count from", 0), ("of the response stay", 0))),
        ("inputs.positions", where, "positions", tuple(("of the response moved by", jump) for jump in jumps)),
        ("inputs.positions", where, "positions", tuple(("at most", number) for number in lengths)),
        ("inputs.positions", where, "positions", (("moved by", 1), ("moved by", -1))),
    ]
    if reference.image_tokens:
        rows.append(("inputs.image_pixels", "any", "pixels", ("zeros", "black", "white", "reversed")))
        rows.append(("inputs.image_positions", "any", "text_positions", ("all", "response")))
    rows += _weights(reference, adapters)
    rows += _keys(config.to_dict(), reference)
    return [Experiment(*row) for row in rows if row[3]]


def _weights(reference: Reference, adapters: Mapping[str, Tensor]) -> Iterator[tuple[Any, ...]]:
    """Rows of other values of weights, and of modules that are left out."""
    parameters = reference.parameters
    if old := reference.initial:
        yield "weights.stale", "any", "weights.old values", (old,)
        if adapters:
            yield "model.lora_scale", "any", "adapter", (0.0, 0.25, 0.5, 2.0, 4.0, 8.0), True
            leaves = sorted({name.split(".")[-2] for name in old})
            unmerged = tuple(
                {name: base for name, base in old.items() if name.split(".")[-2] == leaf} for leaf in leaves
            )
            yield "model.lora_merge", "any", "weights.unmerged", unmerged if len(leaves) > 1 else ()
    yield "model.lora_merge", "any", "weights.base plus adapter", tuple(filter(None, [_merged(reference, adapters)]))
    head, embedding = reference.model.get_output_embeddings(), reference.model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight and head.weight.shape == embedding.weight.shape:
        name = next(name for name, parameter in parameters.items() if parameter is head.weight)
        yield "model.tied_head", "head", "weights.embedding as head", ({name: embedding.weight.detach().clone()},)
    yield "weights.exchanged", "any", "weights.exchanged", tuple(_exchanged(parameters))
    norms = {name: p for name, p in parameters.items() if p.ndim == 1 and "norm" in name and name.endswith("weight")}
    offsets = tuple({name: p + offset for name, p in norms.items()} for offset in (-1, 1))
    yield "model.norm_offset", "norm", "weights.norms minus or plus 1", offsets
    biases = {name: torch.zeros_like(p) for name, p in parameters.items() if name.endswith(".bias")}
    yield "model.bias", "linear norm attention", "weights.no bias", (biases,) if biases else ()
    yield "model.rope", "rope attention linear", "weights.interleaved heads", tuple(_interleaved(reference))
    modules = {name.rpartition(".")[2] for name, _ in reference.model.named_modules() if name.endswith("norm")}
    pairs = [["k_norm", "q_norm"]] if "q_norm" in modules else []
    yield "model.skipped", "any", "skipped", (*pairs, *([name] for name in sorted(modules)))


def _exchanged(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Layers in other orders, and siblings of equal shapes in each other's place."""
    numbers = sorted({int(number) for name in parameters for number in re.findall(r"layers\.(\d+)\.", name)})
    for order in (numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1]):
        others = {f"layers.{number}.": f"layers.{other}." for number, other in zip(numbers, order, strict=True)}
        renamed = {name: re.sub(r"layers\.\d+\.", lambda match: others[match[0]], name) for name in parameters}  # noqa: B023
        yield {name: parameters[other] for name, other in renamed.items() if other != name and other in parameters}
    for one, other in (("gate_proj", "up_proj"), ("k_proj", "v_proj")):
        names = {name: name.replace(one, other) for name in parameters if one in name}
        names |= {other: name for name, other in names.items()}
        yield {name: parameters[other] for name, other in names.items() if other in parameters}


def _merged(reference: Reference, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the spec's model plus B A of `adapters`, if they are not the exported ones."""
    merged = {}
    for name, factor in adapters.items():
        path, _, side = name.rpartition(".lora_")
        if side.startswith("A") and (weight := f"{path}.weight") in reference.parameters:
            product = adapters[f"{path}.lora_B.weight"].float() @ factor.float()
            base = reference.initial[weight] if weight in reference.initial else reference.parameters[weight]
            merged[weight] = base + product.to(base)
    return {name: new for name, new in merged.items() if not torch.allclose(new, reference.parameters[name], atol=1e-5)}


def _interleaved(reference: Reference) -> Iterator[dict[str, Tensor]]:
    """Queries and keys whose units are rotated in neighbouring pairs, not in halves; and the other way round."""
    layers = [module for name, module in reference.model.named_modules() if name.endswith("self_attn")]
    size = getattr(layers[0], "head_dim", 0) if layers else 0
    if not isinstance(size, int) or not size:
        return
    pairs = torch.arange(size).view(2, -1).T.flatten()
    for order in (pairs, pairs.argsort()):
        yield {
            name: parameter.view(-1, size, *parameter.shape[1:])[:, order].reshape(parameter.shape)
            for name, parameter in reference.parameters.items()
            if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")) and len(parameter) % size == 0
        }


def _keys(config: Mapping[str, Any], reference: Reference) -> Iterator[tuple[Any, ...]]:
    """Rows of keys of the model's config: first the defaults, of an engine that ignores a key, then other values."""
    ignored, defaults = PreTrainedConfig().to_dict().keys(), type(reference.config)().to_dict()
    named = {
        key: value
        for key, value in config.items()
        if key not in ignored and ("multiplier" in key or not SIZES.search(key))
    }
    for key, value in named.items():
        default = defaults.get(key)
        if default != value and isinstance(default, int | float | str) and "window" not in key:
            yield cause_of(key), "any", f"config.{key}", (default,)
    for key, value in config.items():
        row = cause_of(key), "any", f"config.{key}"
        if key == "rope_parameters" and isinstance(value, dict):
            for layers in [kind for kind in value if isinstance(value[kind], dict)] or [""]:
                yield from _rope(f"config.{key}{layers and '.'}{layers}", value[layers] if layers else value)
        elif key == "layer_types" and value:
            others = {tuple(value[::-1]), *((kind,) * len(value) for kind in set(value))} - {tuple(value)}
            yield row[0], "attention", row[2], tuple(map(list, sorted(others)))
        elif "hidden_act" in key:
            yield row[0], "activation router linear", row[2], tuple(act for act in ACTIVATIONS if act != value)
        elif key.endswith("_per_tok") and isinstance(value, int):
            numbers = {1, 2, 4, 8, value - 1, value + 1} - {value}
            yield row[0], "router", row[2], tuple(sorted(n for n in numbers if 0 < n <= reference.num_experts))
        elif key in named and isinstance(value, bool):
            yield *row, (not value,)
        elif key in named and isinstance(value, float) and value > 0:
            values = _grid(1e-8, 1, 17) if "eps" in key else _grid(value / 16, value * 16, 9)
            none = (1e6,) if "softcap" in key else ()
            yield row[0], "norm" if "eps" in key else "any", row[2], (*values, *none), True
        elif isinstance(value, int) and row[0] == "model.attention_scale":
            yield (
                row[0],
                "attention",
                row[2],
                tuple(sorted({max(1, int(v)) for v in _grid(value / 16, value * 16, 9)})),
                True,
            )


def _rope(key: str, value: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of rope's parameters."""
    kinds, plain = "rope attention", {"rope_type": "default", "rope_theta": value["rope_theta"]}
    yield "model.rope", kinds, f"{key}.rope_theta", _grid(100, 1e8, 25), True
    if "partial_rotary_factor" in value:
        plain["partial_rotary_factor"] = value["partial_rotary_factor"]
        yield "model.rope", kinds, f"{key}.partial_rotary_factor", (0.25, 0.5, 0.75, 1.0)
    factors = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
    yield "model.rope_scaling", kinds, key, (plain, *({**plain, "rope_type": "linear", "factor": f} for f in factors))


Choice = tuple[Experiment, Any]
"""An experiment and the value that was found."""


def applied(edits: Edits, chosen: Sequence[Choice]) -> Edits:
    """All choices together."""
    for experiment, value in chosen:
        edits = experiment.edit(edits, value)
    return edits


def explain(
    table: Sequence[Experiment],
    edits: Edits,
    kinds: set[str],
    measure: Callable[[Edits], float],
    scan: Callable[[Edits], float],
    noise: float,
) -> tuple[list[Choice], float]:
    """Experiments of these kinds that explain the gap together, and the gap that is left: at each turn the best one.

    `scan` is a cheaper `measure`.
    """
    chosen: list[Choice] = []
    first = left = measure(edits)
    while left > noise:
        current, trials = applied(edits, chosen), []
        for experiment in table:
            begins = {"any", *kinds} & set(experiment.kinds.split()) or "everything" in kinds
            if not begins or experiment.name in {taken.name for taken, _ in chosen}:
                continue
            trials.append((*_best(experiment, current, scan), experiment))
            if trials[-1][0] <= noise:
                break
        if not trials:
            break
        _, value, experiment = min(trials, key=lambda trial: trial[0])
        after = measure(experiment.edit(current, value))
        if left - after < MIN_SHARE * first:
            break
        chosen.append((experiment, value))
        left = after
    return chosen, left


def _best(experiment: Experiment, edits: Edits, measure: Callable[[Edits], float]) -> tuple[float, Any]:
    """Smallest gap of an experiment, and its value."""
    values = experiment.values
    tried = sorted((measure(experiment.edit(edits, value)), index) for index, value in enumerate(values))
    least, index = tried[0]
    value = values[index]
    if not experiment.refined:
        return least, value
    kind = type(value)
    low, high = values[max(index - 1, 0)], values[min(index + 1, len(values) - 1)]
    for _ in range(REFINEMENTS):
        for middle in (kind((low + value) / 2), kind((value + high) / 2)):
            if middle not in (low, value, high) and (nearer := measure(experiment.edit(edits, middle))) < least:
                low, high = (low, value) if middle < value else (value, high)
                least, value = nearer, middle
                break
        else:
            low, high = (low + value) / 2, (value + high) / 2
    return least, value


def fitted_bias(logits_NV: Tensor, chosen_N: Tensor, logprobs_N: Floats) -> dict[int, float]:
    """Logits that were added to a few token ids, from the logprobs of the sampled tokens.

    A bias b of token v lowers the logprobs of all other tokens by log(1 + p_v (exp(b) - 1)).
    """
    probs_NV, measured_N = logits_NV.softmax(-1), torch.from_numpy(np.array(logprobs_N))
    plain_N = probs_NV.gather(1, chosen_N[:, None])[:, 0].log()
    difference_N, biases = (plain_N - measured_N).double(), dict[int, float]()
    for _ in range(4):
        factors_NV = (difference_N.exp() - 1)[:, None] / probs_NV.clamp_min(1e-9)
        factor_V = factors_NV.median(0).values.clamp_min(-1.0)
        rest_NV = (difference_N[:, None] - torch.log1p((probs_NV * factor_V).clamp_min(-1 + 1e-9))).abs()
        token = int(rest_NV.median(0).values.argmin())
        if token in biases or rest_NV[:, token].median() > difference_N.abs().median() / 2:
            break
        biases[token] = float(np.log1p(max(float(factor_V[token]), -1 + 1e-12)))
        difference_N = difference_N - torch.log1p(probs_NV[:, token] * factor_V[token])
    return biases
