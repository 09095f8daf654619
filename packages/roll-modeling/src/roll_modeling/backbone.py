"""From flat tokens to hidden states, and from hidden states to logits, for any architecture of transformers.

Tokens stay flat if all token mixing goes through transformers' attention interface. Otherwise they are padded to a
rectangle internally. A trial on a few tokens decides which applies, once per model: see `_flat_is_exact`.

Shapes: T flat tokens, S sequences, L length of the longest, H hidden size, V vocabulary, N tokens given to the head.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_core.errors import ModelError, UnsupportedError, one_line
from roll_modeling import attention
from roll_modeling.logprobs import (
    HeadOutputs,
    HeadRequest,
    LinearHead,
    any_head_outputs,
    compared,
    head_outputs,
    linear_head,
    read_head,
    write_head,
)
from roll_modeling.memory import padded_rows
from roll_modeling.model import body_of, image_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.train import Comparison
    from roll_core.types import Media
    from roll_modeling.context_parallel import ContextParallel
    from roll_modeling.images import ImageReader, Images
    from roll_modeling.routing import RoutingReplay

log = logging.getLogger(__name__)

PROBE_LENGTHS = (4, 1, 3)


class Backbone:
    """Model without its head. `flat` is True if it computes without padding."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attn_implementation: str = "auto",
        context: ContextParallel | None = None,
        replay: RoutingReplay | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Choose between flat and padded computation by running the model on a few tokens, and with `images` on a small
        image.

        With `context`, this rank computes hidden states of its part of the tokens only. `replay` must belong to
        `model`; it receives the experts passed to `hidden`. Raises `ModelError` or `UnsupportedError` for a model that
        cannot be computed as configured.
        """
        self.model, self.context, self.replay, self.images = model, context, replay, images
        self.joins_images = False
        """True to run the image encoder for microbatches without images as well: ranks that have images wait for it."""
        self.reduces_gradients = False
        """True if ranks reduce the gradients of each parameter together: an image encoder or projector that is trained
        then runs for microbatches without images as well, and gets gradients of 0."""
        self.rope = RopeBySequence(model)
        self.module = body_of(model)
        self.why_padded = f"attn_implementation: {attn_implementation}"
        usual = model.config._attn_implementation
        self.flat = attn_implementation in ("auto", attention.NAME) and self._try_flat()
        if not self.flat:
            if attn_implementation == attention.NAME:
                raise ModelError(f"{type(model).__name__} cannot use {attention.NAME}; set attn_implementation: auto")
            if context is not None:
                raise UnsupportedError(
                    f"{type(model).__name__} requires padding ({self.why_padded}); context"
                    " parallelism supports only models without padding"
                )
            self._check_causal()
        elif context is not None:
            self._check_context(context)
        if images is not None and not images.unsupported:
            self._try_images(images, usual)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routed_experts_TMK: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, `[T, H]`; with `context`, those of this rank's part.

        Raises `UnsupportedError` for routed experts without `router_replay`, and for images with `context`.
        """
        if images is not None or self.images is None or not self._joins(self.images):
            return self._hidden(tokens_T, positions_T, lengths, routed_experts_TMK, images)
        zero = self.images.nothing()  # before the language model, which is the order of the ranks with images
        return self._hidden(tokens_T, positions_T, lengths, routed_experts_TMK, None) + zero

    def _joins(self, images: ImageReader) -> bool:
        """True if this pass runs the image encoder without images."""
        backward = torch.is_grad_enabled() and images.trained and self.reduces_gradients
        return not images.unsupported and (self.joins_images or backward)

    def _hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routed_experts_TMK: Tensor | None,
        images: Images | None,
    ) -> Tensor:
        if self.replay is not None:
            self.replay.begin(None if routed_experts_TMK is None else self.as_seen(routed_experts_TMK, lengths))
        elif routed_experts_TMK is not None:
            raise UnsupportedError("the microbatch has routed experts, but router_replay is off")
        if self.context is not None:
            if images is not None:
                raise UnsupportedError("images are not supported with context parallelism: set its size to 1")
            return self._shared(tokens_T, positions_T, lengths, self.context)
        if self.flat:
            num_tokens = len(tokens_T)
            if images is None or not images.starts_with_image:
                tokens_T, positions_T, lengths = self._with_spare(tokens_T, positions_T, lengths)
            return self._flat(tokens_T, positions_T, self._layout(lengths, images), images)[:num_tokens]
        return self._padded(tokens_T, lengths, images)

    def _layout(self, lengths: Sequence[int], images: Images | None) -> attention.FlatLayout:
        if images is None or self.images is None or not self.images.both_ways:
            return attention.FlatLayout(tuple(lengths))
        blocks = (*images.blocks, *[None] * (len(lengths) - len(images.blocks)))
        return attention.FlatLayout(tuple(lengths), blocks=blocks)

    def _shared(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], context: ContextParallel
    ) -> Tensor:
        more = -len(tokens_T) % context.multiple
        if more:
            tokens_T = torch.cat([tokens_T, tokens_T[:1].expand(more)])
            positions_T = torch.cat([positions_T, torch.arange(more, device=positions_T.device)])
            lengths = (*lengths, more)
        mine = context.part(len(tokens_T)).to(tokens_T.device)
        return self._flat(tokens_T[mine], positions_T[mine], attention.FlatLayout(tuple(lengths), context))

    def _with_spare(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Sequence[int]]:
        """On the host in float32, append one sequence to reach `padded_rows` tokens.

        It repeats the first token. Token 0 may be the padding, whose embedding is zero: Gemma 3n divides by its norm.
        """
        weight = next(self.model.parameters())
        on_host = weight.device.type == "cpu" and weight.dtype == torch.float32
        more = padded_rows(len(tokens_T)) - len(tokens_T)
        if not on_host or self.replay is not None or more == 0:
            return tokens_T, positions_T, lengths
        tokens_T = torch.cat([tokens_T, tokens_T[:1].expand(more)])
        return tokens_T, torch.cat([positions_T, torch.arange(more)]), (*lengths, more)

    def _flat(
        self, tokens_T: Tensor, positions_T: Tensor, layout: attention.FlatLayout, images: Images | None = None
    ) -> Tensor:
        if self.rope.needed:
            lengths_T = torch.tensor(layout.lengths).repeat_interleave(torch.tensor(layout.lengths))
            if layout.context is not None and self.context is not None:
                lengths_T = lengths_T[self.context.part(len(lengths_T)).cpu()]
            self.rope.lengths = lengths_T[None].to(tokens_T.device)
        position_ids, more = positions_T[None], self._features(images)
        if images is not None and images.positions_AT is not None:
            num_spare = len(tokens_T) - images.positions_AT.shape[1]
            spare_AT = positions_T[len(tokens_T) - num_spare :].expand(len(images.positions_AT), -1)
            position_ids = torch.cat([images.positions_AT, spare_AT], dim=1)[:, None]
        # Without a mask, transformers looks for packed sequences, for which the host waits; `roll_layout` has them.
        outputs = self.module(
            input_ids=tokens_T[None],
            position_ids=position_ids,
            attention_mask=torch.ones_like(tokens_T, dtype=torch.bool)[None],
            use_cache=False,
            roll_layout=layout,
            **more,
        )
        states: Tensor = outputs[0][0]
        return states

    def _features(self, images: Images | None) -> dict[str, Any]:
        """Argument of the model with the features of images."""
        if images is None or self.images is None:
            return {}
        return {"mm_encoder_outputs": self.images.features(images)}

    def as_seen(self, values_TXY: Tensor, lengths: Sequence[int]) -> Tensor:
        """Values of tokens, at least 0, in the order in which the routers receive the tokens.

        The order is flat, this rank's part, or padded rows. Padding gets -1.
        """
        if self.context is not None:
            num_tokens = len(values_TXY)
            part = self.context.part(num_tokens).to(values_TXY.device)
            values = values_TXY[part.clamp(max=num_tokens - 1)]
            return values.masked_fill_((part >= num_tokens)[:, None, None], -1)
        if self.flat:
            return values_TXY
        size = len(lengths) * max(lengths)
        seen = values_TXY.new_full((size, *values_TXY.shape[1:]), -1)
        return seen.index_copy_(0, _places(lengths).to(seen.device), values_TXY)

    def disagreement(self, lengths: Sequence[int]) -> Tensor | None:
        """Per token, the share of replayed experts that the routers would not have chosen, `[T]`.

        Refers to the last `hidden`; None if it replayed nothing. Collective over `context`.
        """
        found_N = None if self.replay is None else self.replay.disagreement_N
        if found_N is not None and self.context is not None:
            part = self.context.part(sum(lengths)).to(found_N.device)
            here = part < sum(lengths)
            return self.context.whole(found_N.new_zeros(sum(lengths)).index_copy(0, part[here], found_N[here]))
        if found_N is None or self.flat:
            return found_N
        return found_N.index_select(0, _places(lengths).to(found_N.device))

    def _padded(self, tokens_T: Tensor, lengths: Sequence[int], images: Images | None = None) -> Tensor:
        """Rows begin at position 0, which is every architecture's default."""
        longest = max(lengths)
        shape = len(lengths), longest
        places_T = _places(lengths).to(tokens_T.device)
        tokens_SL = tokens_T[:1].repeat(len(lengths) * longest).index_copy(0, places_T, tokens_T)
        mask_SL = torch.zeros_like(tokens_SL).index_fill(0, places_T, 1)
        more = self._features(images)
        if images is not None and self.images is not None:
            types_SL = torch.zeros_like(mask_SL).index_copy(0, places_T, images.types_T)
            more |= self.images.types(types_SL.view(shape))
            if (positions_AT := images.positions_AT) is not None:
                rows_AL = positions_AT.new_zeros(len(positions_AT), len(mask_SL)).index_copy(1, places_T, positions_AT)
                more["position_ids"] = rows_AL.view(-1, *shape)
        if self.rope.needed:
            more["position_ids"] = torch.arange(longest, device=tokens_T.device).expand(shape)
            self.rope.lengths = torch.tensor(lengths, device=tokens_T.device)[:, None].expand(shape)
        outputs = self.module(
            input_ids=tokens_SL.view(shape),
            attention_mask=mask_SL.view(shape),
            use_cache=False,
            **more,
        )
        hidden_SLH: Tensor = outputs[0]
        return hidden_SLH.reshape(len(lengths) * longest, -1).index_select(0, places_T)

    # -- which layout is right for this architecture -------------------------------------------------------------------

    def _try_flat(self) -> bool:
        attention.register()
        before = self.model.config._attn_implementation
        self._set_attention(attention.NAME)
        why = ""
        try:
            if self._flat_is_exact(before):
                return True
            why = "flat and separate sequences give different numbers"
        except Exception as error:  # architectures may fail in any way on inputs that they do not support
            why = f"{type(error).__name__}: {error}"
        log.info("%s computes with padding: %s", type(self.model).__name__, why)
        self.why_padded = why
        self._set_attention(before)
        return False

    def _set_attention(self, name: str) -> None:
        """Set the attention of the language model; an encoder of images keeps its own."""
        others = {id(module) for part in image_parts(self.model).values() for top in part for module in top.modules()}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if id(module) not in others and config is not None and hasattr(config, "_attn_implementation"):
                # A string would set the configs of all parts.
                config._attn_implementation = {"": name}

    @torch.no_grad()
    def _flat_is_exact(self, usual: str) -> bool:
        """True if all layers use this attention, sequences stay separate and causal, and results equal single runs."""
        config = self.model.config.get_text_config()
        tokens_T, positions_T = self._probe()
        layout = attention.FlatLayout(PROBE_LENGTHS)
        together_TH = self._flat(tokens_T, positions_T, layout)
        if layout.num_calls != config.num_hidden_layers:
            return False
        tolerance = self._tolerance(together_TH)
        # Changing the second sequence's first and the third one's last token must not affect earlier or other tokens.
        changed_T = tokens_T.clone()
        changed_T[[4, 7]] = (changed_T[[4, 7]] + 1) % config.vocab_size
        after_TH = self._flat(changed_T, positions_T, attention.FlatLayout(PROBE_LENGTHS))
        unmoved = [0, 1, 2, 3, 5, 6]
        if float((after_TH - together_TH)[unmoved].abs().max()) > tolerance:
            return False
        self._set_attention(usual)
        alone = []
        start = 0
        for length in PROBE_LENGTHS:
            span = slice(start, start + length)
            alone.append(self.module(input_ids=tokens_T[None, span], use_cache=False)[0][0])
            start += length
        self._set_attention(attention.NAME)
        return float((torch.cat(alone) - together_TH).abs().max()) <= tolerance

    @torch.no_grad()
    def _try_images(self, images: ImageReader, usual: str) -> None:
        """Compare sequences with an image to the model's own computation of each sequence.

        Decides whether the tokens of an image attend to each other in both directions, and pads if flat is not exact.
        If no layout is, images are not supported.
        """
        why = ""
        try:
            probe, device = images.probe, next(self.model.parameters()).device
            read, lengths, tokens_T = probe.images, probe.lengths, probe.tokens_T.to(device)
            positions_T = attention.flat_positions(lengths).to(device)
            self._set_attention(usual)
            alone_TH = self._alone(tokens_T, lengths, images, probe.media_S)
            tolerance = self._tolerance(alone_TH)
            # PaliGemma's text before the response attends in both directions, and it does not know where that begins.
            end, last = lengths[0], lengths[0] + lengths[1] - 1
            changed_L = tokens_T[end : last + 1].clone()
            changed_L[-1] = tokens_T[1]
            changed_LH = self._alone(changed_L, lengths[1:2], images, probe.media_S[1:2])
            if float((changed_LH[:-1] - alone_TH[end:last]).abs().max()) > tolerance:
                raise UnsupportedError("beside an image, tokens of text attend to later ones")

            def difference(hidden_TH: Tensor) -> float:
                return float((hidden_TH - alone_TH).abs().max())

            if self.flat:
                self._set_attention(attention.NAME)
                differences: dict[bool, float] = {}
                for both_ways in (False, True) if images.has_blocks else (False,):
                    images.both_ways = both_ways
                    differences[both_ways] = math.inf
                    with suppress(UnsupportedError):
                        flat_TH = self._flat(tokens_T, positions_T, self._layout(lengths, read), read)
                        differences[both_ways] = difference(flat_TH)
                images.both_ways = min(differences, key=lambda both_ways: differences[both_ways])
                if differences[images.both_ways] <= tolerance:
                    return
                self.why_padded = "sequences with images give different numbers when they are flat"
                log.info("%s computes with padding: %s", type(self.model).__name__, self.why_padded)
                self.flat, images.both_ways = False, False
                self._set_attention(usual)
            if difference(self._padded(tokens_T, lengths, read)) > tolerance:
                why = "padded and separate sequences give different numbers"
        except Exception as error:  # architectures may fail in any way on inputs that they do not support
            why = f"{type(error).__name__}: {one_line(error)}"
            self._set_attention(attention.NAME if self.flat else usual)
        if why:
            images.unsupported = f"{type(self.model).__name__}: {why}"
            log.info("images are not supported: %s", images.unsupported)

    def _alone(
        self, tokens_T: Tensor, lengths: Sequence[int], images: ImageReader, media_S: Sequence[tuple[Media, ...]]
    ) -> Tensor:
        """Hidden states of each sequence by the model's own computation, which also encodes its images."""
        rows: list[Tensor] = []
        for tokens_L, media in zip(torch.split(tokens_T, list(lengths)), media_S, strict=True):
            read = images.read(tokens_L.cpu(), (len(tokens_L),), (media,), ("probe",))
            more = {} if read is None else {**images.inputs(read), **images.types(read.types_T[None])}
            rows.append(self.module(input_ids=tokens_L[None], use_cache=False, **more)[0][0])
        return torch.cat(rows)

    @torch.no_grad()
    def _check_context(self, context: ContextParallel) -> None:
        """Raise `ModelError` if anything except attention mixes tokens."""
        # The first sequence spans several ranks; the second shares a rank with its end.
        lengths = (2 * context.size + 1, context.size)
        tokens_T, positions_T = self._probe(lengths)
        alone_TH = self._flat(tokens_T, positions_T, attention.FlatLayout(lengths))
        found_TH = self._shared(tokens_T, positions_T, lengths, context)
        part = context.part(len(tokens_T)).to(tokens_T.device)
        inside = part < len(tokens_T)
        differences = (found_TH[inside] - alone_TH[part[inside]]).abs().flatten()
        if not context.largest(torch.cat([differences, differences.new_zeros(1)])) <= self._tolerance(alone_TH):
            raise ModelError(
                f"{type(self.model).__name__} computes different numbers on {context.size} context-parallel"
                " ranks: not only attention mixes tokens; disable context parallelism"
            )

    @torch.no_grad()
    def _check_causal(self) -> None:
        vocab_size = self.model.config.get_text_config().vocab_size
        tokens_T, _ = self._probe()
        try:
            before_TH = self._padded(tokens_T, PROBE_LENGTHS)
            tokens_T[3] = (tokens_T[3] + 1) % vocab_size
            after_TH = self._padded(tokens_T, PROBE_LENGTHS)
        except Exception as error:  # architectures may fail in any way on inputs that they do not support
            raise ModelError(f"{type(self.model).__name__} cannot compute a text: {one_line(error)}") from error
        if float((after_TH - before_TH)[:3].abs().max()) > self._tolerance(before_TH):
            raise ModelError(f"{type(self.model).__name__} attends to later tokens; only causal models are supported")

    def _probe(self, lengths: Sequence[int] = PROBE_LENGTHS) -> tuple[Tensor, Tensor]:
        vocab_size = self.model.config.get_text_config().vocab_size
        device = next(self.model.parameters()).device
        tokens_T = (torch.arange(sum(lengths), device=device) * 7 + 3) % vocab_size
        return tokens_T, attention.flat_positions(lengths).to(device)

    def _tolerance(self, hidden_TH: Tensor) -> float:
        """Tolerance of about a thousand (fp32) or a few (bf16) roundings of the largest value."""
        relative = 1e-4 if hidden_TH.dtype == torch.float32 else 5e-2
        return relative * float(hidden_TH.float().abs().max())


class RopeBySequence:
    """Rotary embeddings whose frequencies depend on the length (LongRoPE, dynamic NTK), by each sequence's own.

    transformers takes the longest sequence of a pass, so that a short one would be computed differently beside it, or
    after it: dynamic NTK remembers the length.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace the `forward` of the model's rotary embeddings of these types."""
        self.lengths: Tensor | None = None
        """Length of the sequence of each token in the pass, in the shape of its `position_ids`."""
        self.needed = False
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
            if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
                module.forward = partial(self._forward, module, module.forward)
                self.needed = True

    def _forward(
        self, module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **named: Any
    ) -> Any:
        lengths = self.lengths
        if lengths is None or lengths.shape != position_ids.shape:
            return forward(x, position_ids, *args, **named)
        gathered: list[Tensor] = []
        outputs: Any = None
        for length in torch.unique(lengths).tolist():
            for name in [attribute for attribute in vars(module) if attribute.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)  # dynamic NTK computes the frequencies anew
            here = lengths == length
            # The last position of a sequence of this length decides about the frequencies.
            positions = nn.functional.pad(position_ids[here].clamp(max=length - 1), (0, 1), value=length - 1)
            outputs = forward(x, positions[None], *args, **named)
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            gathered = gathered or [part.new_empty(*lengths.shape, *part.shape[2:]) for part in parts]
            for every, part in zip(gathered, parts, strict=True):
                every[here] = part[0, :-1]
        return tuple(gathered) if isinstance(outputs, tuple) else gathered[0]


def _places(lengths: Sequence[int]) -> Tensor:
    """Index of each token in the padded rectangle, row by row. Padding comes last, so a causal model ignores it."""
    longest = max(lengths)
    return torch.tensor([row * longest + column for row, length in enumerate(lengths) for column in range(length)])


class LanguageHead:
    """Output layer of a causal language model, applied chunk by chunk."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._other: tuple[str, LinearHead] | None = None
        """The other model's head of the last comparison, and its file."""
        self.is_linear = self._is_linear()
        if not self.is_linear:
            log.info("%s: logits are computed by its own code, chunk by chunk", type(model).__name__)

    def outputs(
        self, hidden_NH: Tensor, targets_N: Tensor, request: HeadRequest, gather_ids_NK: Tensor | None = None
    ) -> HeadOutputs:
        """Logprobs of the targets and of the given ids, and the other outputs of `request`."""
        if self.is_linear:
            head = self._linear(self.model.get_output_embeddings())
            # Mamba's hidden states are float32 for every dtype of the model.
            return head_outputs(head, hidden_NH.to(head.weight.dtype), targets_N, request, gather_ids_NK)
        vocab_size = self.model.config.get_text_config().vocab_size
        return any_head_outputs(self._own_logits, vocab_size, hidden_NH, targets_N, request, gather_ids_NK)

    def compared(
        self,
        hidden_NH: Tensor,
        other_NH: Tensor,
        comparison: Comparison,
        request: HeadRequest,
        weights_N: Tensor | None = None,
    ) -> Tensor:
        """Values of a comparison with another model's distributions, `[N]`; see `logprobs.compared`."""
        self._need_linear()
        if self._other is None or self._other[0] != comparison.head:
            self._other = comparison.head, read_head(comparison.head, hidden_NH.device)
        head = self._linear(self.model.get_output_embeddings())
        hidden_NH = hidden_NH.to(head.weight.dtype)
        return compared(head, hidden_NH, self._other[1], other_NH, comparison.function, request, weights_N)

    def write(self, path: Path, gather: Callable[[Tensor], Tensor], *, writes: bool) -> None:
        """Write the head to a file, for `compared` of another model. Raises `UnsupportedError` if it is not linear.

        `gather` gathers a parameter. Collective if parameters are sharded; only the rank that `writes` writes.
        """
        self._need_linear()
        head = self._linear(self.model.get_output_embeddings())
        bias = None if head.bias is None else gather(head.bias)
        head = replace(head, weight=gather(head.weight), bias=bias)
        if writes:
            write_head(head, path)

    def _need_linear(self) -> None:
        if not self.is_linear:
            raise UnsupportedError(
                f"{type(self.model).__name__}: its head is no linear layer, so distributions over the whole vocabulary"
                " cannot be compared"
            )

    def _linear(self, layer: nn.Linear) -> LinearHead:
        """Created for each use, because a layer with sharded parameters holds a different tensor each time."""
        return linear_head(self.model.config.get_text_config(), layer.weight, layer.bias)

    @torch.no_grad()
    def _is_linear(self) -> bool:
        """True if the linear formula reproduces the logits of the model's own code."""
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            return False
        head = self._linear(layer)
        shape = (3, layer.in_features)
        probe_NH = torch.linspace(-2.0, 2.0, shape[0] * shape[1], device=layer.weight.device).view(shape)
        probe_NH = probe_NH.to(layer.weight.dtype)
        try:
            own_NV = self._own_logits(probe_NH).float()
        except Exception as error:
            raise ModelError(
                f"{type(self.model).__name__}: its head cannot be computed apart from its body ({error}), so logits of"
                " all tokens would have to exist at once"
            ) from error
        relative = 1e-4 if layer.weight.dtype == torch.float32 else 5e-2
        return torch.allclose(head.logits(probe_NH), own_NV, rtol=0, atol=relative * float(own_NV.abs().max() + 1e-6))

    def _own_logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits that the model's own `forward` computes from these hidden states."""
        with _body_returns(self.model, hidden_NH[None]):
            dummy = torch.zeros(1, len(hidden_NH), dtype=torch.int64, device=hidden_NH.device)
            logits_NV: Tensor = self.model(input_ids=dummy, use_cache=False).logits[0]
        return logits_NV


class _Outputs:
    """Output of a body, for heads that read the hidden states under any name or index."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _body_returns(model: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Make every inner `PreTrainedModel` return `hidden` without computing anything, inside this context."""
    from transformers import PreTrainedModel

    bodies = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    outputs = _Outputs(hidden)
    for body in bodies:
        body.forward = lambda *_args, **_kwargs: outputs
    try:
        yield
    finally:
        for body in bodies:
            del body.forward  # restores the method of the class
