"""Memory model of the Megatron strategies: bytes per rank, by the formulas in docs/plan.md. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem, MemorySaving
from roll_modeling.memory import MASTER_BYTES, MOMENT_BYTES, computation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.model import ModelSize
    from roll_core.spec.plan import MemoryInput
    from roll_strategy_megatron.config import MegatronConfig

HOST_BYTES = 16
"""Host memory per offloaded parameter: master copy, gradient, two moments."""


def memory(question: MemoryInput) -> MemoryEstimate:
    """Memory use of a rank of the first or last pipeline stage, whichever needs more."""
    config = cast("MegatronConfig", question.config)
    size = DTYPE_BYTES[question.dtype]
    dense, experts = _parameters(question.model, config)
    held = dense + experts
    uses = [MemoryItem.of("weights", size, held, note="of a rank", offloads=True)]
    if question.random_weights:  # each rank builds the full model; a checkpoint is read tensor by tensor
        note = "sampled before it is sharded"
        uses.append(MemoryItem.of("weights", 4, question.model.parameters, note=note, during=("start",), on="host"))
    if question.trains:
        uses += _trained(question, config, dense, experts)
    stage = _stage(question, config)
    uses += computation(stage, fused=False, chunk_tokens=config.logprob_chunk_tokens, recomputes=True)
    return MemoryEstimate(uses=tuple(uses), savings=tuple(_savings(question, config)))


def _parameters(model: ModelSize, config: MegatronConfig) -> tuple[int, int]:
    """Numbers of dense and expert parameters on a rank.

    Tensor parallelism shards dense parameters, expert parallelism shards experts, and stages split layers. The first
    and the last stage each have one of the two vocabulary matrices.
    """
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    expert_ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or tensor)
    layers = sum(layer.parameters - layer.experts for layer in model.layers)
    experts = sum(layer.experts for layer in model.layers)
    ends = model.embedding if stages > 1 else model.embedding + model.head
    return layers // (tensor * stages) + max(ends, model.head) // tensor, experts // (expert_ranks * stages)


def _trained(question: MemoryInput, config: MegatronConfig, dense: int, experts: int) -> Iterator[MemoryItem]:
    """Float32 gradients of a rank's trained parameters, and AdamW state of its shard.

    One of an adapter's two factors is sharded by tensor parallelism; both are counted as replicated.
    """
    if question.added_parameters:
        dense, experts = -(-question.trained_parameters // config.pipeline_model_parallel_size), 0
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    replicas = max(1, question.world_size // (tensor * stages))  # over data-parallel and context-parallel ranks
    expert_ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or tensor)
    expert_replicas = max(1, question.world_size // (expert_ranks * stages))
    yield MemoryItem.of("gradients", 4, dense + experts, note="of a rank", offloads=True)
    apart = question.dtype != "fp32" and not question.added_parameters
    state = MOMENT_BYTES + (MASTER_BYTES if apart else 0)
    share = dense // replicas + experts // expert_replicas
    away = math.ceil(share * config.optimizer_offload_fraction) if config.optimizer_cpu_offload else 0
    note = f"a rank's shard, less {MOMENT_BYTES} bytes of those on the host" if away else "a rank's shard"
    less = MOMENT_BYTES * away
    yield MemoryItem.of("optimizer", state, share, note=note, less=less, during=LATER, offloads=True)
    if away:
        yield MemoryItem.of("optimizer", HOST_BYTES, away, note="masters, gradients, moments", during=LATER, on="host")


def _stage(question: MemoryInput, config: MegatronConfig) -> MemoryInput:
    """The `MemoryInput` of a first-stage rank: its layers, for the microbatches in flight before the first backward
    pass."""
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    model = question.model
    layers = tuple(replace(layer, active_width=layer.active_width // tensor) for layer in model.layers)
    cut = replace(
        model,
        query_width=model.query_width // tensor,
        key_width=model.key_width // tensor,
        num_heads=max(1, model.num_heads // tensor),
        vocab_size=-(-model.vocab_size // tensor),
        layers=layers[: -(-len(layers) // stages)],
    )
    tokens = -(-question.train_tokens // config.context_parallel_size)
    return replace(
        question,
        model=cut,
        on_host=False,
        train_tokens=math.ceil(tokens * min(_on_their_way(config), question.num_micro_batches)),
        score_tokens=-(-question.score_tokens // config.context_parallel_size),
        gradient_checkpointing=question.gradient_checkpointing and config.recomputation != "selective",
    )


def _on_their_way(config: MegatronConfig) -> float:
    """Number of microbatches whose activations the first stage keeps at once.

    It is the number of stages. An interleaved schedule runs up to twice as far ahead (arXiv:2104.04473, 2.2.2), counted
    in model chunks, each with a fraction of the stage's layers.
    """
    stages, runs = config.pipeline_model_parallel_size, config.runs_per_stage
    return stages if runs == 1 else (2 * (stages - 1) + (runs - 1) * stages + 1) / runs


def _savings(question: MemoryInput, config: MegatronConfig) -> Iterator[MemorySaving]:
    # Megatron can only offload the optimizer of tensors with separate master weights: see `check_model_args`.
    has_masters = question.dtype != "fp32" and not question.added_parameters
    if question.trains and has_masters and not config.optimizer_cpu_offload:
        yield MemorySaving(keys={"optimizer_cpu_offload": True}, costs="optimizer steps run on the host")
    if question.trains and question.gradient_checkpointing and config.recomputation == "selective":
        yield MemorySaving(
            keys={"recompute_granularity": "full", "recompute_modules": None},
            costs="activations are computed twice: about a third more time in training",
        )
