"""Model with the head of its task: computes the requested outputs of a microbatch, and checks its loss.

    MicroBatch -> backbone (flat, or padded inside) -> hidden states -> head, chunk by chunk -> TokenOutputs

Shapes: T flat tokens, N tokens with a predecessor in their sequence, H hidden size, K top-k or given ids.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.data.pack import pack
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.module_program import move_tensors
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_modeling.backbone import Backbone, LanguageHead
from roll_modeling.balancing import RouterBalancing
from roll_modeling.images import image_reader
from roll_modeling.logprobs import HeadOutputs, HeadRequest
from roll_modeling.model import scalar_head
from roll_modeling.model_table import position_table
from roll_modeling.pending_losses import non_finite_tokens
from roll_modeling.routing import RoutingReplay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.train import LossFn, LossMetrics, LossOutput, MicroBatch, WantedOutputs
    from roll_modeling.context_parallel import ContextParallel
    from roll_modeling.process_group import ProcessGroup
    from roll_modeling.strategy_config import HuggingFaceConfig


IDLE = ("idle",)
"""Ids of an idle microbatch."""


class TaskModel:
    """Computes the outputs of a strategy's model. Parameters are read at each call, so they may be replaced."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        *,
        chunk_tokens: int | None = None,
        context: ContextParallel | None = None,
        router_losses: HuggingFaceConfig | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Runs the model on a few tokens to choose its layout.

        `chunk_tokens` is the number of tokens whose logits exist at once; None chooses it. The ranks of `context` share
        the tokens of each microbatch, and all get the whole outputs. Backward passes add the routers' losses of
        `router_losses`, times `loss_scale`, by which the strategy multiplies losses. Raises `ModelError` or
        `UnsupportedError`.
        """
        self.model, self.task, self.chunk_tokens, self.context = model, spec.task, chunk_tokens, context
        replay = RoutingReplay(model) if spec.router_replay else None
        self.images = image_reader(model, spec)
        """Reads the images of microbatches; None for a model without images, or without a processor of them."""
        self.backbone = Backbone(
            model, attn_implementation=spec.attn_implementation, context=context, replay=replay, images=self.images
        )
        self.head = LanguageHead(model) if spec.task == "causal_lm" else None
        self.balancing: RouterBalancing | None = None
        if router_losses is not None and router_losses.router_loss:
            group = None if context is None else context.group
            self.balancing = RouterBalancing(model, router_losses, group=group, scale=loss_scale)
        self.num_positions = position_table(model.config.to_dict())
        """Longest sequence of a model with a table of positions; None for others."""

    def join_images(self, micros: Sequence[MicroBatch], ranks: ProcessGroup) -> None:
        """Let each pass until the next call run the image encoder, if any rank has images among its `micros`.

        For encoders whose parameters are gathered when they run. Collective for a model that reads images.
        """
        if self.images is not None:
            self.backbone.joins_images = bool(ranks.most([any(any(micro.media_S) for micro in micros)])[0])

    def outputs(self, micro: MicroBatch, want: WantedOutputs, host: MicroBatch | None = None) -> TokenOutputs:
        """Compute the requested outputs, with gradients where parameters have them.

        `host` is the microbatch in host memory, from which `micro` was moved. Without it, the host waits for the masks
        of a `micro` on a device. Raises `UnsupportedError` for outputs that the task does not have.
        """
        host = micro if host is None else host
        if not want.base:
            return self._outputs(micro, want, host)
        from roll_modeling.lora import adapters_off

        with adapters_off(self.model):
            return self._outputs(micro, want, host)

    def loss(self, loss: LossFn, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute a loss from the outputs of `micro`, with the routers' metrics. Collective over `context`."""
        output = loss(outputs, micro)
        if self.balancing is not None:
            output = replace(output, metrics={**output.metrics, **self.balancing.metrics()})
        return output

    def _begin_balancing(self, micro: MicroBatch) -> None:
        """Announce the tokens of trained sequences to the routers' losses, before a forward pass with gradients."""
        if self.balancing is None:
            return
        if not torch.is_grad_enabled() or micro.ids == IDLE:
            self.balancing.begin(None)
            return
        segments_T = micro.segments_T.long()
        num_trained_S = torch.zeros(len(micro.lengths), device=segments_T.device)
        num_trained_S = num_trained_S.index_add(0, segments_T, micro.loss_mask_T.float())
        members_T = segments_T.where(num_trained_S[segments_T] > 0, -1)
        members_N = self.backbone.as_seen(members_T[:, None, None], micro.lengths).flatten()
        self.balancing.begin(members_N, len(micro.lengths), micro.totals.sequences)

    def _outputs(self, micro: MicroBatch, want: WantedOutputs, host: MicroBatch) -> TokenOutputs:
        self._begin_balancing(micro)
        if self.num_positions is not None:
            check_positions(micro, self.num_positions)
        images = None
        if self.images is not None:
            images = self.images.read(host.tokens_T, host.lengths, host.media_S, host.ids)
        elif any(host.media_S):
            raise UnsupportedError(
                f"the batch has images, but {type(self.model).__name__} has no image encoder, or its tokenizer no"
                " processor of images (preprocessor_config.json) beside it"
            )
        routed_TMK = micro.routed_experts_TMK
        hidden_TH = self.backbone.hidden(micro.tokens_T, micro.positions_T, micro.lengths, routed_TMK, images)
        values_T = self._values(hidden_TH, host) if want.values else None
        if not want.head:
            return TokenOutputs(values_T=values_T, hidden_TH=self._hidden(hidden_TH, host) if want.hidden else None)
        if self.head is None:
            raise UnsupportedError(f"a model of task {self.task} has no logprobs")
        # Token t is predicted from the hidden state at t - 1. A sequence's first token is predicted from nothing.
        wanted_T = host.positions_T > 0
        if want.masked_only:
            wanted_T = wanted_T & host.read_T
        other_TH = None if want.comparison is None else teacher_hidden(micro)
        if other_TH is not None and not other_TH.shape[1]:
            wanted_T = torch.zeros_like(wanted_T)
        places_N, rows_N = self._here(wanted_T, hidden_TH.device, before=1)
        check_ids(host, want, self.model.config.get_text_config().vocab_size)
        ids_TK = gather_ids(micro, want)
        request = HeadRequest(
            temperature=want.temperature,
            entropy=want.entropy,
            entropy_grad=want.entropy_grad,
            topk=want.topk,
            chunk_tokens=self.chunk_tokens,
        )
        hidden_NH, compared_N = hidden_TH.index_select(0, rows_N), None
        if want.comparison is not None and other_TH is not None:
            weights_T = micro.streams.get(want.comparison.stream)
            weights_N = None if weights_T is None else weights_T[places_N]
            compared_N = self.head.compared(hidden_NH, other_TH[places_N], want.comparison, request, weights_N)
        outputs = HeadOutputs(logprobs_N=hidden_NH[:, 0].float())
        if replace(want, comparison=None).head:
            ids_NK = None if ids_TK is None else ids_TK[places_N]
            outputs = self.head.outputs(hidden_NH, micro.tokens_T[places_N], request, ids_NK)

        def spread(outputs_N: Tensor | None) -> Tensor | None:
            return None if outputs_N is None else self._spread(outputs_N, places_N, micro.num_tokens)

        return TokenOutputs(
            logprobs_T=spread(outputs.logprobs_N) if want.logprobs else None,
            entropy_T=spread(outputs.entropy_N),
            values_T=values_T,
            topk_logprobs_TK=spread(outputs.topk_logprobs_NK),
            topk_ids_TK=spread(outputs.topk_ids_NK),
            gathered_logprobs_TK=spread(outputs.gathered_logprobs_NK),
            hidden_TH=self._hidden(hidden_TH, host) if want.hidden else None,
            compared_T=spread(compared_N),
            routing_disagreement_T=self._disagreement(micro),
        )

    def _hidden(self, hidden_TH: Tensor, micro: MicroBatch) -> Tensor:
        """Hidden state from which each token is predicted, float32."""
        places_N, rows_N = self._here(micro.positions_T > 0, hidden_TH.device, before=1)
        return self._spread(hidden_TH.index_select(0, rows_N).float(), places_N, micro.num_tokens)

    def _disagreement(self, micro: MicroBatch) -> Tensor | None:
        """Routing disagreement of the token before each token, which predicts it."""
        found_T = self.backbone.disagreement(micro.lengths)
        return None if found_T is None else found_T.roll(1).where(micro.positions_T > 0, 0.0)

    def _here(self, wanted_T: Tensor, device: torch.device, *, before: int) -> tuple[Tensor, Tensor]:
        """Indices of the wanted tokens that this rank computes, and their rows in its hidden states, on `device`.

        A token's row is the one `before` positions earlier.
        """
        places_N = wanted_T.nonzero()[:, 0]
        rows_N = places_N - before
        if self.context is not None:
            part = self.context.part(len(wanted_T)).to(rows_N.device)
            # Index of each token among this rank's tokens. The last ones may lie beyond the end (padding).
            own_T = rows_N.new_full((max(len(wanted_T), int(part.max()) + 1),), -1)
            own_T[part] = torch.arange(len(part), device=part.device)
            here_N = own_T[rows_N]
            places_N, rows_N = places_N[here_N >= 0], here_N[here_N >= 0]
        moved = move_tensors({"places": places_N, "rows": rows_N}, device)
        return moved["places"], moved["rows"]

    def _spread(self, outputs_N: Tensor, places_N: Tensor, num_tokens: int) -> Tensor:
        """Scatter outputs to their positions among all tokens; 0 elsewhere."""
        spread_T = outputs_N.new_zeros(num_tokens, *outputs_N.shape[1:]).index_copy(0, places_N, outputs_N)
        return spread_T if self.context is None else self.context.whole(spread_T)

    def _values(self, hidden_TH: Tensor, micro: MicroBatch) -> Tensor:
        """Values of the state before each token (`value`), or of the sequence including each token (`reward`)."""
        if self.task == "causal_lm":
            raise UnsupportedError("a causal language model has no values; the role needs task value or reward")
        is_value = self.task == "value"
        wanted_T = micro.positions_T > 0 if is_value else torch.ones_like(micro.loss_mask_T)
        places_N, rows_N = self._here(wanted_T, hidden_TH.device, before=int(is_value))
        head = scalar_head(self.model)
        values_T: Tensor = head(hidden_TH.to(head.weight.dtype))[:, 0].float()
        return self._spread(values_T.index_select(0, rows_N), places_N, micro.num_tokens)


def gather_ids(micro: MicroBatch, want: WantedOutputs) -> Tensor | None:
    """Ids whose logprobs are wanted, `[T, K]`; None if none are wanted. K is 0 for an idle microbatch, without ids."""
    if want.gathered and micro.gather_ids_TK is None:
        return micro.tokens_T.new_zeros(len(micro.tokens_T), 0)
    return micro.gather_ids_TK if want.gathered else None


def teacher_hidden(micro: MicroBatch) -> Tensor:
    """The other model's hidden states for `WantedOutputs.comparison`, `[T, H]`.

    H is 0 for an idle microbatch, whose tokens are not compared. Raises `DataError` for others without hidden states.
    """
    if micro.teacher_hidden_TH is not None:
        return micro.teacher_hidden_TH
    if micro.ids != IDLE:
        raise DataError("a comparison with another model needs teacher_hidden, but the batch has none")
    return torch.zeros(micro.num_tokens, 0, device=micro.tokens_T.device)


def check_positions(micro: MicroBatch, num_positions: int) -> None:
    """Raise `DataError` for a sequence that is longer than the model's table of positions."""
    for id, length in zip(micro.ids, micro.lengths, strict=True):
        if length > num_positions:
            raise DataError(
                f"sequence {id}: {length} tokens are more than the {num_positions} positions of the model; lower"
                " prompt_length and response_length, or train a model with more positions"
            )


def check_ids(micro: MicroBatch, want: WantedOutputs, vocab_size: int) -> None:
    """Raise `UnsupportedError` for more ids per token than the vocabulary has, and `DataError` for ids outside of it.

    Covers top-k and given ids.
    """
    ids_TK = micro.gather_ids_TK if want.gathered else None
    number = max(want.topk, 0 if ids_TK is None else ids_TK.shape[1])
    if number > vocab_size:
        raise UnsupportedError(f"logprobs of {number} ids per token are wanted, but the vocabulary has {vocab_size}")
    if ids_TK is None:
        return
    outside_TK = (ids_TK < 0) | (ids_TK >= vocab_size)
    if bool(outside_TK.any()):
        token, place = outside_TK.nonzero()[0].tolist()
        raise DataError(
            f"sequence {micro.ids[int(micro.segments_T[token])]}: gather_ids has {int(ids_TK[token, place])} at token"
            f" {int(micro.positions_T[token])}; the vocabulary has ids 0 to {vocab_size - 1}"
        )


def finite_loss(loss: LossFn, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    """Compute the loss of a microbatch. Raises `NonFiniteError`, naming the sequences, for a non-finite loss.

    The check prevents NaN gradients. On a device the host waits for it; see `pending_losses.PendingLosses`.
    """
    output = loss(outputs, micro)
    value = float(output.loss.detach())
    if not math.isfinite(value):
        raise non_finite_tokens(value, outputs, micro)
    return output


def plain_metrics(output: LossOutput) -> LossMetrics:
    """Metrics of a microbatch as plain floats."""
    return {
        name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        for name, value in output.metrics.items()
    }


def idle_microbatch() -> MicroBatch:
    """A microbatch of one dummy sequence with two tokens, for ranks that only participate in collectives."""
    mask = np.array([False, True])
    return pack([TrainSequence(id=IDLE[0], tokens=np.zeros(2, dtype=np.int64), loss_mask=mask)])[0]


def zero_loss(outputs: TokenOutputs) -> Tensor:
    """A loss of 0 that depends on every output with a gradient, so that its backward pass has the same collectives."""
    heads = (outputs.logprobs_T, outputs.entropy_T, outputs.gathered_logprobs_TK, outputs.compared_T)
    every = (*heads, outputs.values_T)
    parts = [part[:0].sum() for part in every if part is not None and part.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())
