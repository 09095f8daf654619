"""Memory estimate of the embedded engine, with the formulas of docs/plan.md. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem, MemorySaving
from roll_infer_hf.config import HFInferConfig
from roll_modeling.memory import FEWER_SEQUENCES, image_uses, start_uses

if TYPE_CHECKING:
    from roll_core.spec.plan import Activity, MemoryInput

GIB = 2**30
ALIGNMENT = 16
"""Multiple to which the positions of a cache row are rounded up; the same as `kv_cache.ALIGNMENT`."""
PACKED_ELEMENTS = 60_000
"""Minimum number of elements of a weight that `decoder.Projection` packs."""


def engine(question: MemoryInput) -> MemoryEstimate:
    """Memory of the embedded engine: weights, packed copies, KV cache up to `kv_cache_gib`, activations and logits."""
    config = question.config
    if not isinstance(config, HFInferConfig):
        raise TypeError(f"expected HFInferConfig, got {type(config).__name__}")
    size, model = DTYPE_BYTES[question.dtype], question.model
    during: tuple[Activity, ...] = ("start", "receive") if question.shares_weights else ()
    uses = [MemoryItem.of("weights", size, model.parameters, during=during, offloads=True), *start_uses(question)]
    if packed := _packed(question, config):
        uses.append(MemoryItem.of("weights", size, packed, note="packed for the processor", offloads=True))
    if config.enable_lora:
        base = sum(linear.outputs * linear.inputs for layer in model.layers for linear in layer.linears)
        note = "base weights of the adapter if it has all linear layers"
        uses.append(MemoryItem.of("weights", size, base, note=note, during=LATER, offloads=True))
    if joined := _joined(question):
        note = "joined projections of a layer beside their parts"
        uses.append(MemoryItem.of("buffers", size, joined, note=note, during=("start",)))
    width = -(-question.longest // ALIGNMENT) * ALIGNMENT
    position = 2 * len(model.layers) * model.key_width * (4 if question.on_host else size)
    room = int(config.kv_cache_gib * GIB)
    rows = max(1, min(config.max_num_seqs, question.outputs or config.max_num_seqs, room // max(1, width * position)))
    prompts = min(config.max_num_batched_tokens, question.prompt_tokens * rows)
    rows_bytes, rows_formula, copied = rows * width * position, f"{rows} rows × {width} positions", 0
    if not question.on_host:
        # An accelerator backs the whole buffer; the host only the pages that are written.
        widest = -(-(model.max_positions or width) // ALIGNMENT) * ALIGNMENT
        copied = rows_bytes // (2 * max(1, len(model.layers)))
        rows_bytes = min(room, config.max_num_seqs * widest * position)
        rows_formula = f"{rows_bytes // position} positions within kv_cache_gib"
    active_width = max((layer.active_width for layer in model.layers), default=0)
    live = (3 * model.hidden_size + max(2 * (model.query_width + 2 * model.key_width), 3 * active_width)) * size
    tokens = max(prompts, rows)
    generate: tuple[Activity, ...] = ("generate",)
    for what, num_bytes, formula, during in (
        ("kv cache", rows_bytes, f"{rows_formula} × {position} bytes", LATER),
        ("kv cache", prompts * position, f"{prompts} tokens of prompts × {position} bytes", generate),
        (
            "activations",
            max(tokens * live, copied),
            f"of one layer for {tokens} tokens, or one layer's keys while rows grow",
            generate,
        ),
        ("logits", 12 * rows * model.vocab_size, f"3 × 4 × {rows} rows × {model.vocab_size} logits", generate),
    ):
        offloads = what == "kv cache"
        uses.append(MemoryItem(what=what, num_bytes=num_bytes, formula=formula, during=during, offloads=offloads))
    uses += image_uses(question, -(-prompts // max(1, question.prompt_tokens)), "generate")
    return MemoryEstimate(uses=tuple(uses), savings=_smaller_caches(config, rows_bytes))


def _joined(question: MemoryInput) -> int:
    """Largest number of parameters of sibling projections, which an accelerator joins one by one at the start."""
    siblings = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    counts = (
        sum(linear.outputs * linear.inputs for linear in layer.linears if linear.path.endswith(names))
        for layer in question.model.layers
        for names in siblings
    )
    return 0 if question.on_host else max(counts, default=0)


def _packed(question: MemoryInput, config: HFInferConfig) -> int:
    """Number of parameters that the fast path packs. Sibling projections count as one matrix."""
    model = question.model
    if not (config.pack_weights and question.on_host) or any(layer.experts for layer in model.layers):
        return 0
    counts = [linear.outputs * linear.inputs for layer in model.layers for linear in layer.linears]
    counts.append(model.vocab_size * model.hidden_size)
    return sum(count for count in counts if count >= PACKED_ELEMENTS)


def _smaller_caches(config: HFInferConfig, used: int) -> tuple[MemorySaving, ...]:
    """Suggestions that save memory: lower `kv_cache_gib`, no packed weights.

    Starts at half of the used cache: a limit above the used size saves nothing.
    """
    largest_gib = min(config.kv_cache_gib, used / GIB) / 2
    limits = [round(largest_gib / 2**halvings, 3) for halvings in range(3) if largest_gib / 2**halvings >= 0.05]
    savings = [MemorySaving(keys={"kv_cache_gib": limit}, costs=FEWER_SEQUENCES) for limit in limits]
    if config.pack_weights:
        savings.append(MemorySaving(keys={"pack_weights": False}, costs="decoding takes up to twice as long"))
    return tuple(savings)
