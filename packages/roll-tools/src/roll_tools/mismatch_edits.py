"""Edits of the reference that `roll-core doctor mismatch` tries: one row for each cause, and the search of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.runtime.records import mismatch as records
from roll_tools.mismatch_reference import FORMATS, FP8, Edits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import SamplingParams
    from roll_tools.mismatch_reference import Reference

LOW = (torch.bfloat16, torch.float16)
MIN_SHARE = 0.15
"""Smallest share of a side's gap that an edit must explain."""
REFINEMENTS = 12
FIXES = {
    **records.FIXES,
    "sampling.top_p": "actor_infer.generating_args.top_p: 1",
    "sampling.top_k": "actor_infer.generating_args.top_k: 0",
    "sampling.min_p": "actor_infer.generating_args.min_p: 0",
    "inputs.special_tokens": "prompts that begin with the special token once: the template, or add_special_tokens",
    "inputs.template": "data.template, or the engine's own: both sides get the same token ids",
    "inputs.images": "the images and the encoder of both sides: processor, dtype, order",
    "inputs.positions": "positions that count through prompt and response from 0",
    "inputs.image_pixels": "the image processor of both sides: preprocessor_config.json, pixel limits, order of images",
    "inputs.image_positions": "positions of image tokens by rows and columns (mrope) on both sides",
    "model.rope": "model_config_kwargs.rope_parameters.rope_theta, equal on both sides",
    "model.rope_scaling": "model_config_kwargs.rope_parameters: type and factor, equal on both sides",
    "model.attention_scale": "the model's config: head_dim, query_pre_attn_scalar, attention_multiplier",
    "model.attention_softcap": "model_config_kwargs.attn_logit_softcapping, equal on both sides",
    "model.sliding_window": "model_config_kwargs.sliding_window, equal on both sides",
    "model.norm_epsilon": "model_config_kwargs.rms_norm_eps, equal on both sides",
    "model.logit_softcap": "model_config_kwargs.final_logit_softcapping, equal on both sides",
    "model.tied_head": "model_config_kwargs.tie_word_embeddings: false",
    "model.lora_scale": "lora_alpha, lora_rank and use_rslora, equal on both sides",
    "model.lora_merge": "report to the trainer's plugin: it exports other weights than it computes with",
    "model.router_replay": "router_replay.mode: R3",
    "arithmetic.dtype": "model_args.dtype, equal on both sides",
    "arithmetic.kv_dtype": "actor_infer.strategy_args.strategy_config: the KV cache in the model's dtype",
    "weights.differ": "report to the engine's plugin: it computes with other weights than it was sent",
    "weights.stale": "report to the engine's plugin: it computes with old weights",
    "weights.exported": "report to the trainer's plugin: it exports other weights than it computes with",
    "weights.rounded": "model_args.dtype, and the engine's quantization: equal on both sides",
    "engine.batch": "actor_infer.strategy_args.strategy_config.max_num_seqs: 1",
    "engine.prefix_cache": "actor_infer.strategy_args.strategy_config: prefix caching off (min_shared_prefix: 0)",
    "engine.stale_cache": "report to the engine's plugin: clear the prefix cache when weights change",
    "engine.random": "the engine's kernels: ones that are deterministic",
    "trainer.random": "dropout of the trainer: 0 while it scores; deterministic kernels",
    "trainer.packing": "the trainer's batches: infer_batch_size: 1, or packing off",
}
"""Smallest change for each cause, in keys of the config. Parts named `arithmetic.<part>` compute in float32."""


def fix_of(name: str) -> str:
    """The change that removes a cause."""
    return FIXES.get(name) or f"{name.partition('.')[2]} in float32, or equal on both sides: compare both codes there"


@dataclass(frozen=True, slots=True)
class Experiment:
    """An edit of the reference with the values to try."""

    name: str
    kinds: str
    """Kinds of points at which it can begin; `any` is everywhere, `logits` after the model."""
    values: tuple[Any, ...]
    edit: Callable[[Edits, Any], Edits]
    refined: bool = False
    """Between the best value and its neighbours, the best one is searched."""


def set_field(name: str) -> Callable[[Edits, Any], Edits]:
    """An edit that sets one field."""
    return lambda edits, value: replace(edits, **{name: value})


def compute_in(kind: str) -> Callable[[Edits, Any], Edits]:
    """An edit that lets a kind of module compute in a dtype."""
    return lambda edits, dtype: replace(edits, computed_in={**edits.computed_in, kind: dtype})


def filtered_by(name: str) -> Callable[[Edits, Any], Edits]:
    """An edit that filters tokens before the logprobs are computed."""
    return lambda edits, value: replace(edits, filters={**edits.filters, name: value})


def with_weights(edits: Edits, weights: Mapping[str, Tensor]) -> Edits:
    """Other values of some weights."""
    return replace(edits, weights={**edits.weights, **weights})


def special_token(edits: Edits, ids: tuple[int, ...]) -> Edits:
    """Another first token; no first token if there are no `ids`."""
    return replace(edits, prepended=ids, dropped=0 if ids else 1)


def _grid(low: float, high: float, number: int) -> tuple[float, ...]:
    return tuple(float(value) for value in np.geomspace(low, high, number))


def _lengths(longest: int) -> tuple[int, ...]:
    """Every length of at most 48 tokens, and 24 larger ones; the search refines them."""
    larger = {int(value) for value in np.geomspace(49, longest, 24)} if longest > 49 else set()
    return (*range(1, min(longest, 48) + 1), *sorted(larger))


def experiments(
    reference: Reference, params: SamplingParams, longest: int, adapters: Mapping[str, Tensor]
) -> list[Experiment]:
    """The table of edits, for sequences of at most `longest` tokens, and a trainer with these adapters."""
    temperature, attention = params.temperature or 1.0, "rope attention"
    config = reference.model.config.get_text_config()
    special = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    first_tokens = (*((token,) for token in sorted({token for token in special if isinstance(token, int)})), ())
    bases = tuple(math.log(base) / math.log(reference.base) for base in _grid(100, 1e8, 25))
    lengths, jumps = _lengths(longest), (*range(-8, 0), *range(1, 9))
    rows: list[tuple[Any, ...]] = [
        ("sampling.temperature", "logits", (1.0, *_grid(temperature / 4, 4 * temperature, 9)), "temperature", True),
        ("sampling.processed_logprobs", "logits", (True,), "processed"),
        ("sampling.top_p", "logits", (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), filtered_by("top_p"), True),
        ("sampling.top_k", "logits", (1, 2, 5, 10, 20, 50, 100, 200), filtered_by("top_k"), True),
        ("sampling.min_p", "logits", _grid(0.005, 0.5, 8), filtered_by("min_p"), True),
        ("sampling.repetition_penalty", "logits", _grid(0.5, 2, 8), "penalty", True),
        ("inputs.shift", "logits", (1, -1), "shift"),
        ("model.logit_softcap", "logits", (*_grid(2, 64, 8), 1e6), "softcap", True),
        ("arithmetic.logprobs", "logits", LOW, compute_in("logprobs")),
        ("arithmetic.head", "head", LOW, compute_in("head")),
        ("arithmetic.norm", "norm", LOW, compute_in("norm")),
        ("arithmetic.rope", attention, LOW, compute_in("rope")),
        ("arithmetic.rope", attention, LOW, compute_in("angles")),
        ("arithmetic.rope", attention, LOW, compute_in("products")),
        ("arithmetic.router", "router", LOW, compute_in("router")),
        ("arithmetic.softmax", "attention", LOW, compute_in("softmax")),
        ("arithmetic.softmax", "attention", LOW, compute_in("probabilities")),
        ("arithmetic.kv_dtype", "attention", (*LOW, FP8), compute_in("kv")),
        ("arithmetic.linear", "linear", LOW, compute_in("linear")),
        ("arithmetic.dtype", "any", LOW, compute_in("all")),
        ("weights.rounded", "any", FORMATS, "rounded"),
        ("model.rope", attention, bases, "rope_base", True),
        ("model.rope_scaling", attention, (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0), "rope_factor", True),
        ("model.attention_scale", "attention", _grid(0.125, 8, 13), "scale", True),
        ("model.sliding_window", "attention", lengths, "window", True),
        ("model.norm_epsilon", "norm", _grid(1e-8, 1, 17), "epsilon", True),
        ("inputs.truncation", "inputs embedding", lengths, "num_visible", True),
        ("inputs.special_tokens", "inputs embedding", first_tokens, special_token),
        ("inputs.template", "inputs embedding", (1, 2, 3, 4), "cut"),
        ("inputs.positions", "inputs embedding rope attention", (True,), "restarted"),
        ("inputs.positions", "inputs embedding rope attention", jumps, "jump"),
        ("inputs.positions", "inputs embedding rope", (1, -1), "offset"),
    ]
    if getattr(config, "attn_logit_softcapping", None):
        rows.append(("model.attention_softcap", "attention", (*_grid(2, 128, 9), 1e6), "attention_softcap", True))
    if reference.image_tokens:
        rows.append(("inputs.image_pixels", "any", ("zeros", "black", "white", "reversed"), "pixels"))
        rows.append(("inputs.image_positions", "any", ("all", "response"), "text_positions"))
    if old := reference.initial:
        rows.append(("weights.stale", "any", (old,), with_weights))
        if adapters:
            rows.append(
                ("model.lora_scale", "any", (0.0, 0.25, 0.5, 2.0, 4.0, 8.0), reference.with_adapter_scale, True)
            )
    if merged := reference.merged(adapters):
        rows.append(("model.lora_merge", "any", (merged,), with_weights))
    if tied := reference.tied_head():
        rows.append(("model.tied_head", "head", (tied,), with_weights))
    return [
        Experiment(name, kinds, values, set_field(edit) if isinstance(edit, str) else edit, *refined)
        for name, kinds, values, edit, *refined in rows
    ]


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
    tried = sorted((measure(experiment.edit(edits, value)), index) for index, value in enumerate(experiment.values))
    least, index = tried[0]
    value = experiment.values[index]
    if not experiment.refined:
        return least, value
    kind = type(value)
    low = experiment.values[max(index - 1, 0)]
    high = experiment.values[min(index + 1, len(experiment.values) - 1)]
    for _ in range(REFINEMENTS):
        for middle in (kind((low + value) / 2), kind((value + high) / 2)):
            if middle not in (low, value, high) and (nearer := measure(experiment.edit(edits, middle))) < least:
                low, high = (low, value) if middle < value else (value, high)
                least, value = nearer, middle
                break
        else:
            low, high = (low + value) / 2, (value + high) / 2
    return least, value


def described(experiment: Experiment, value: Any) -> str:
    """Name and value of a choice."""
    if isinstance(value, dict):
        return f"other values of {len(value)} weights"
    name = experiment.name.partition(".")[2].replace("_", " ")
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {str(value).removeprefix('torch.')}"
