"""Forward and backward passes of microbatches through the stages of a replica, and the outputs of the last stage.

    stage 0: tokens -> layers ->  stage 1: layers -> hidden states -> head -> outputs -> loss

Shapes: T flat tokens, L tokens of this rank, N of them with a successor, H hidden size, K top-k or given
ids.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from roll_core.errors import UnsupportedError
from roll_core.spec.train import TokenOutputs
from roll_modeling.logprobs import HeadRequest, linear_head, read_head
from roll_modeling.task_model import check_ids, gather_ids, idle_microbatch, teacher_hidden
from roll_strategy_megatron.head import (
    ExchangedIds,
    VocabularyShare,
    sharded_comparison,
    sharded_head_outputs,
    share_of_head,
)
from roll_strategy_megatron.packing import Passage, num_padded, on_device, pack_for
from roll_strategy_megatron.pipeline import Pipeline
from roll_strategy_megatron.router_replay import disagreements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig

    from roll_core.spec.providers import Task
    from roll_core.spec.train import Comparison, MicroBatch, WantedOutputs
    from roll_modeling.logprobs import LinearHead
    from roll_strategy_megatron.balancing import Balancing
    from roll_strategy_megatron.bridge.transforms import Sizes
    from roll_strategy_megatron.config import MegatronConfig
    from roll_strategy_megatron.model import PackedModel
    from roll_strategy_megatron.parallel import Parallel


class Computation:
    """Passes of one model's chunks (`runs`); `wrapped` are the chunks inside `DistributedDataParallel`, if they are
    trained."""

    def __init__(
        self,
        runs: Sequence[PackedModel],
        wrapped: Sequence[Any],
        sizes: Sizes,
        parallel: Parallel,
        config: MegatronConfig,
        task: Task,
        described: PreTrainedConfig,
        balancing: Balancing | None = None,
    ) -> None:
        """`described` is transformers' config of the model."""
        self.described = described
        self.runs, self.parallel, self.config, self.task = runs, parallel, config, task
        self.balancing = balancing
        self.pipeline = Pipeline(runs[0].config, wrapped, parallel.pp)
        self.vocab = sizes.vocab
        rows = sizes.padded_vocab // parallel.tp.size()
        first = parallel.tp.rank() * rows
        self.shards = ExchangedIds(parallel.tp, sizes.vocab, rows)
        self.other_head: tuple[str, LinearHead] | None = None
        """File of the other model's head in the last comparison, and this rank's rows of it."""
        self.share = VocabularyShare(group=parallel.tp, first=first, num_real=min(max(sizes.vocab - first, 0), rows))

    def run(
        self,
        micros: Sequence[MicroBatch],
        want: WantedOutputs,
        at_end: Callable[[Passage, TokenOutputs], tuple[Tensor, Any]],
        *,
        backward: bool,
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Run all microbatches through the pipeline.

        Returns, for each microbatch:

        - what `at_end` returned beside the loss; None except on the last stage
        - `routing_disagreement_T`, on every rank, complete after all stages

        Collective over the replica, and over all replicas that share experts.
        """
        # With overlapped reduction, every replica must run at least one backward pass.
        fewest = 1 if backward and self.config.overlap_grad_reduce else 0
        balanced = backward and self.balancing is not None
        passages = self._passages(micros, want, fewest, balanced=balanced)
        if not passages:
            return [], []
        for chunk in self.runs:
            chunk.train(backward)
            if chunk.replay is not None:
                chunk.replay.forget()
        with torch.set_grad_enabled(backward):
            results = self.pipeline.run(partial(self._step, want, at_end), passages, backward=backward)
        return results[: len(micros)] if results else [None] * len(micros), self._disagreements(passages[: len(micros)])

    def _step(
        self,
        want: WantedOutputs,
        at_end: Callable[[Passage, TokenOutputs], tuple[Tensor, Any]],
        passages: Iterator[Passage],
        model: Any,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        passage = next(passages)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            outputs = self._outputs(hidden, passage, want)
            loss, result = at_end(passage, outputs)
            # A token count of 0, because the loss already contains its divisor.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

        return model(passage.packing), finish

    def _passages(
        self, micros: Sequence[MicroBatch], want: WantedOutputs, fewest: int, *, balanced: bool
    ) -> list[Passage]:
        """Pack the microbatches and append idle ones at the end.

        Replicas that share experts need equal numbers of microbatches; interleaved schedules need a multiple of the
        stages.
        """
        for micro in micros:
            self._check_experts(micro)
            check_ids(micro, want, self.vocab)
        number = max(len(micros), fewest)
        if self.parallel.replicas_share_experts:
            (number,) = self.parallel.most([number], self.parallel.dp)
        number += -number % self.pipeline.multiple
        idle = [idle_microbatch()] * (number - len(micros))
        every = [(micro, False) for micro in micros] + [(micro, True) for micro in idle]
        cp_size, align = self.parallel.cp.size(), self.parallel.tp.size() if self.config.sequence_parallel else 1
        tokens = [0] * number
        if number and self.parallel.replicas_share_experts and self.config.moe_token_dispatcher_type == "allgather":
            # Each rank receives the tokens of all ranks, and assumes that all have as many as itself.
            padded = [num_padded(micro.lengths, cp_size=cp_size, align=align) for micro, _ in every]
            tokens = self.parallel.most(padded, self.parallel.dp)
        return [
            Passage(
                micro=on_device(micro, self.parallel.device),
                packing=pack_for(
                    micro,
                    device=self.parallel.device,
                    cp_rank=self.parallel.cp.rank(),
                    cp_size=cp_size,
                    align=align,
                    masked_only=want.masked_only and not want.values,
                    own_state=self.task == "reward",
                    at_least=at_least,
                    members=balanced and not idles,
                ),
                idle=idles,
            )
            for (micro, idles), at_least in zip(every, tokens, strict=True)
        ]

    def _check_experts(self, micro: MicroBatch) -> None:
        replay = self.runs[0].replay
        if micro.routed_experts_TMK is None:
            return
        if replay is None:
            raise UnsupportedError("experts are given to be replayed, but the model was not built with router_replay")
        replay.check(micro.routed_experts_TMK)

    def _disagreements(self, passages: Sequence[Passage]) -> list[Tensor | None]:
        replays = [chunk.replay for chunk in self.runs if chunk.replay is not None]
        if not replays or self.task != "causal_lm":
            return [None] * len(passages)
        return disagreements(replays, passages, self.parallel, sequence_parallel=self.config.sequence_parallel)

    # -- the last stage ------------------------------------------------------------------------------------------------

    def _outputs(self, hidden: Tensor, passage: Passage, want: WantedOutputs) -> TokenOutputs:
        """Outputs of a microbatch, complete on each rank of the last stage."""
        if self.task == "causal_lm":
            return self._of_tokens(hidden, passage, want)
        scores_L: Tensor = self.runs[-1].output_layer(hidden)
        return TokenOutputs(values_T=self._spread(scores_L.index_select(0, passage.packing.rows_N), passage))

    def _of_tokens(self, hidden: Tensor, passage: Passage, want: WantedOutputs) -> TokenOutputs:
        packing = passage.packing
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        request = HeadRequest(
            temperature=want.temperature,
            entropy=want.entropy,
            entropy_grad=want.entropy_grad,
            topk=want.topk,
            chunk_tokens=self.config.logprob_chunk_tokens,
        )
        hidden_NH = hidden[:, 0].index_select(0, packing.rows_N)

        def spread(rows_N: Tensor | None) -> Tensor | None:
            return None if rows_N is None else self._spread(rows_N, passage)

        hidden_TH = spread(hidden_NH.float()) if want.hidden else None
        compared_T = None
        if want.comparison is not None:
            compared_T = spread(self._compared(hidden_NH, passage, want.comparison, request))
        if not replace(want, comparison=None).head:
            return TokenOutputs(hidden_TH=hidden_TH, compared_T=compared_T)
        ids_TK = gather_ids(passage.micro, want)
        outputs = sharded_head_outputs(
            hidden_NH,
            linear_head(self.described, self.runs[-1].head_weight()),
            packing.targets_N,
            request,
            self.share,
            None if ids_TK is None else ids_TK[packing.places_N],
        )
        return TokenOutputs(
            hidden_TH=hidden_TH,
            compared_T=compared_T,
            logprobs_T=spread(outputs.logprobs_N) if want.logprobs else None,
            entropy_T=spread(outputs.entropy_N),
            topk_logprobs_TK=spread(outputs.topk_logprobs_NK),
            topk_ids_TK=spread(outputs.topk_ids_NK),
            gathered_logprobs_TK=spread(outputs.gathered_logprobs_NK),
        )

    def _compared(self, hidden_NH: Tensor, passage: Passage, comparison: Comparison, request: HeadRequest) -> Tensor:
        """Values of a comparison with another model, of the tokens with an output; 0 for an idle microbatch."""
        own_head, places_N = linear_head(self.described, self.runs[-1].head_weight()), passage.packing.places_N
        if self.other_head is None or self.other_head[0] != comparison.head:
            full_head = read_head(comparison.head, torch.device("cpu"))
            share = share_of_head(full_head, self.share, len(own_head.weight), self.vocab)
            device = own_head.weight.device
            bias = None if share.bias is None else share.bias.to(device)
            self.other_head = comparison.head, replace(share, weight=share.weight.to(device), bias=bias)
        other_NH, idle = teacher_hidden(passage.micro)[places_N], len(places_N) if passage.idle else 0
        weights_T = passage.micro.streams.get(comparison.stream)
        weights_N = None if weights_T is None else weights_T[places_N]
        if idle:  # the output layer still has a gradient, for which the reduction over ranks waits
            hidden_NH, other_NH, weights_N = hidden_NH[:0], other_NH[:0], None
        head, function = self.other_head[1], comparison.function
        found_N = sharded_comparison(hidden_NH, own_head, head, other_NH, function, request, weights_N, self.shards)
        return F.pad(found_N, (0, idle))

    def _spread(self, rows_N: Tensor, passage: Passage) -> Tensor:
        """Scatter rows to the indices of their tokens among the T, and sum over context-parallel ranks."""
        places_N = passage.packing.places_N
        own_T = rows_N.new_zeros(passage.micro.num_tokens, *rows_N.shape[1:]).index_copy(0, places_N, rows_N)
        return self._over_context(own_T)

    def _over_context(self, own_T: Tensor) -> Tensor:
        """Sum over context-parallel ranks, each of which has its own tokens' outputs and 0 for the others.

        All ranks compute the same loss of all tokens, so the backward pass needs no sum.
        """
        if self.parallel.cp.size() == 1:
            return own_T
        if own_T.requires_grad:
            sum_T: Tensor = reduce_from_tensor_model_parallel_region(own_T, group=self.parallel.cp)
            return sum_T
        dist.all_reduce(own_T, group=self.parallel.cp)
        return own_T

    # -- to the other stages -------------------------------------------------------------------------------------------

    def on_all_stages(
        self, outputs: TokenOutputs | None, micro: MicroBatch, want: WantedOutputs, disagreement_T: Tensor | None
    ) -> TokenOutputs:
        """Broadcast the last stage's outputs to all stages and add `disagreement_T`. Collective over the stages."""
        last = self.parallel.pp.size() - 1

        def of(
            tensor: Tensor | None, requested: bool, *sizes: int, dtype: torch.dtype = torch.float32
        ) -> Tensor | None:
            if not requested:
                return None
            if tensor is None:
                tensor = torch.zeros(micro.num_tokens, *sizes, dtype=dtype, device=self.parallel.device)
            return self.parallel.from_stage(tensor.contiguous(), last)

        here, k = outputs or TokenOutputs(), want.topk
        num_ids = 0 if micro.gather_ids_TK is None else micro.gather_ids_TK.shape[1]
        return TokenOutputs(
            logprobs_T=of(here.logprobs_T, want.logprobs),
            entropy_T=of(here.entropy_T, want.entropy),
            values_T=of(here.values_T, want.values),
            topk_logprobs_TK=of(here.topk_logprobs_TK, k > 0, k),
            topk_ids_TK=of(here.topk_ids_TK, k > 0, k, dtype=torch.int64),
            gathered_logprobs_TK=of(here.gathered_logprobs_TK, want.gathered, num_ids),
            hidden_TH=of(here.hidden_TH, want.hidden, self.runs[0].config.hidden_size),
            compared_T=of(here.compared_T, want.comparison is not None),
            routing_disagreement_T=disagreement_T,
        )
