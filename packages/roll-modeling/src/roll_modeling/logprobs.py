"""Logprobs and entropies of tokens, computed in chunks, so that the logits of all tokens never exist at once.

Shapes: N tokens whose logprobs are wanted, V vocabulary, H hidden size, C tokens of a chunk, K top-k or given ids.

With `p = softmax(z / temperature)`, upstream gradients `g` of the logprob of token `y` and `e` of the entropy `S`:

    d z = (g * (onehot(y) - p) - e * p * (log p + S)) / temperature

The logprob of each given id adds a term like that of `y`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from roll_core.errors import CheckpointError, UnsupportedError
from roll_modeling.kernels import elementwise, input_gradient, linear, prefers_onednn, weight_gradient
from roll_modeling.memory import HOST_MIN_ADDED, head_chunk, kept_tokens, padded_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

MANY_COLUMNS = 256
"""Minimum number of columns for which searching a row's maximum in blocks is faster."""
ENTROPY_PARTS = 8
"""Number of parts in which torch computes a chunk's entropies. Its temporary results are three times a part's size."""
NEVER = -1e4
"""Lower bound of log probabilities (-inf included) that are multiplied by a probability of 0: 0 × inf is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """Logits as `softcap(scale * (hidden @ weight.T + bias))`, the form of nearly every language model."""

    weight: Tensor
    """Weight of the output layer, `[V, H]`."""
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    """`cap * tanh(z / cap)`; 0 disables it."""

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Logits of a chunk, `[C, V]` in float32."""
        if torch.is_grad_enabled():
            logits_CV = torch.nn.functional.linear(hidden_CH, self.weight, self.bias).float()
        else:
            logits_CV = linear(hidden_CH, self.weight, self.bias).float()
        if self.scale != 1.0:
            logits_CV = logits_CV.mul_(self.scale) if not logits_CV.requires_grad else logits_CV * self.scale
        if self.softcap:
            logits_CV = torch.tanh(logits_CV / self.softcap) * self.softcap
        return logits_CV


def linear_head(config: Any, weight: Tensor, bias: Tensor | None = None) -> LinearHead:
    """The output layer of a language model with this config of transformers."""
    divisor = getattr(config, "logits_scaling", None)
    return LinearHead(
        weight=weight,
        bias=bias,
        scale=getattr(config, "logit_scale", None) or (1.0 / divisor if divisor else 1.0),
        softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """Outputs requested from the head."""

    temperature: float = 1.0
    entropy: bool = False
    entropy_grad: bool = True
    topk: int = 0
    """K most likely tokens. With K = 1, the first of equal ones, like `torch.argmax`."""
    chunk_tokens: int | None = None
    """Tokens of a chunk, C. None: chosen by vocabulary size and device."""

    def chunk(self, vocab_size: int, device: torch.device) -> int:
        """Tokens of a chunk, C."""
        return self.chunk_tokens or head_chunk(vocab_size, on_host=device.type == "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """Outputs for the N tokens, in float32. Top-k outputs carry no gradient."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    topk_logprobs_NK: Tensor | None = None
    topk_ids_NK: Tensor | None = None
    gathered_logprobs_NK: Tensor | None = None


HEAD_OUTPUTS = tuple(field.name for field in fields(HeadOutputs))


def head_outputs(
    head: LinearHead, hidden_NH: Tensor, targets_N: Tensor, request: HeadRequest, gather_ids_NK: Tensor | None = None
) -> HeadOutputs:
    """Logprobs of `targets_N` and `gather_ids_NK`, with gradients to the hidden states and the head."""
    num_tokens, more = len(targets_N), 0
    if prefers_onednn(head.weight) and (more := padded_rows(num_tokens) - num_tokens):
        hidden_NH, targets_N = F.pad(hidden_NH, (0, 0, 0, more)), F.pad(targets_N, (0, more))
        gather_ids_NK = None if gather_ids_NK is None else F.pad(gather_ids_NK, (0, 0, 0, more))
    outputs = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, targets_N, gather_ids_NK, head, request
    )
    if more:
        outputs = tuple(None if output is None else output[:num_tokens] for output in outputs)
    return HeadOutputs(**dict(zip(HEAD_OUTPUTS, outputs, strict=True)))


def any_head_outputs(
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden_NH: Tensor,
    targets_N: Tensor,
    request: HeadRequest,
    gather_ids_NK: Tensor | None = None,
) -> HeadOutputs:
    """Same as `head_outputs`, for a head given as a function of the hidden states; autograd recomputes each chunk."""
    parts: list[HeadOutputs] = []
    size = request.chunk(vocab_size, hidden_NH.device)

    ids_NK = targets_N.new_zeros(len(targets_N), 0) if gather_ids_NK is None else gather_ids_NK

    def part(hidden_CH: Tensor, targets_C: Tensor, ids_CK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        logp_CV = torch.log_softmax(logits(hidden_CH).float() / request.temperature, dim=-1)
        chosen_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
        entropy_C = _entropy(logp_CV) if request.entropy else logp_CV.new_zeros(0)
        if not request.entropy_grad:
            entropy_C = entropy_C.detach()
        return chosen_C, entropy_C, *_topk(logp_CV.detach(), request.topk), logp_CV.gather(1, ids_CK)

    for start in range(0, max(len(targets_N), 1), size):
        span = slice(start, start + size)
        outputs = checkpoint(
            part, hidden_NH[span], targets_N[span], ids_NK[span], use_reentrant=False, preserve_rng_state=False
        )
        parts.append(HeadOutputs(**dict(zip(HEAD_OUTPUTS, outputs, strict=True))))

    def joined(name: str, requested: bool) -> Tensor | None:
        return torch.cat([getattr(part, name) for part in parts]) if requested else None

    return HeadOutputs(
        logprobs_N=torch.cat([part.logprobs_N for part in parts]),
        entropy_N=joined("entropy_N", request.entropy),
        topk_logprobs_NK=joined("topk_logprobs_NK", request.topk > 0),
        topk_ids_NK=joined("topk_ids_NK", request.topk > 0),
        gathered_logprobs_NK=joined("gathered_logprobs_NK", gather_ids_NK is not None),
    )


class VocabularyShards:
    """Exchange of a chunk between ranks that each have the logits of some ids. By default one rank has all ids.

    v ids of a rank, c tokens of the chunk that a rank compares over all V ids.
    """

    def all_ids(self, logits_Cv: Tensor) -> Tensor:
        """Logits of all ids for this rank's tokens, `[c, V]`, from those of its ids for all tokens of the chunk."""
        return logits_Cv

    def own_ids(self, gradient_cV: Tensor) -> Tensor:
        """The reverse exchange of a gradient: that of this rank's ids for all tokens, `[C, v]`."""
        return gradient_cV

    def own_tokens(self, values_C: Tensor) -> Tensor:
        """Values of this rank's tokens."""
        return values_C

    def all_tokens(self, values_c: Tensor) -> Tensor:
        """Values of all tokens of the chunk, from those of each rank's tokens."""
        return values_c


ONE_RANK = VocabularyShards()


def compared(
    head: LinearHead,
    hidden_NH: Tensor,
    other: LinearHead,
    other_hidden_NH: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    request: HeadRequest,
    weights_N: Tensor | None = None,
    shards: VocabularyShards = ONE_RANK,
) -> Tensor:
    """Values `[N]` of `function`, which compares another model's logprobs with this one's, chunk by chunk.

    Gradients flow to this model's hidden states and head. With `weights_N`, the gradient of the values' weighted sum is
    computed with them, and the backward pass of a multiple of this sum costs nothing. For other upstream gradients, and
    without weights, the backward pass computes the logits again.

    If ranks have `shards` of both heads, the gradient of `hidden_NH` is this rank's part of a sum over these ranks.
    """
    values_N: Tensor = _Compared.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, head, other, other_hidden_NH, function, request, weights_N, shards
    )
    return values_N


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        head: LinearHead,
        other: LinearHead,
        other_hidden_NH: Tensor,
        function: Callable[[Tensor, Tensor], Tensor],
        request: HeadRequest,
        weights_N: Tensor | None,
        shards: VocabularyShards,
    ) -> Tensor:
        ctx.save_for_backward(hidden_NH, other_hidden_NH, weights_N)
        ctx.rest = head, other, function, request, shards
        ahead = weights_N is not None and any(ctx.needs_input_grad[:3])
        values_N, ctx.gradients = _compare(ctx, hidden_NH, other_hidden_NH, weights_N if ahead else None)
        return values_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        hidden_NH, other_hidden_NH, weights_N = ctx.saved_tensors
        if grad_N is None:
            grad_N = hidden_NH.new_zeros(len(hidden_NH), dtype=torch.float32)
        factor = _multiple(grad_N, weights_N) if ctx.gradients else None
        if factor is None:
            factor = grad_N.new_ones(())
            _, ctx.gradients = _compare(ctx, hidden_NH, other_hidden_NH, grad_N)
        gradients = [None if gradient is None else gradient.mul_(factor) for gradient in ctx.gradients]
        ctx.gradients = ()
        return (*gradients, None, None, None, None, None, None, None)


def _multiple(grad_N: Tensor, weights_N: Tensor) -> Tensor | None:
    """Factor with which the weights equal the upstream gradient; None if there is none."""
    if not len(grad_N):
        return grad_N.new_ones(())
    position = weights_N.abs().argmax()
    factor = grad_N[position] / weights_N[position]
    same = torch.isfinite(factor) & ((grad_N - factor * weights_N).abs().max() <= 1e-6 * grad_N.abs().max())
    return factor if bool(same) else None


def _compare(
    ctx: Any, hidden_NH: Tensor, other_hidden_NH: Tensor, upstream_N: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Values, and with `upstream_N` the gradients of hidden states, weight and bias."""
    head: LinearHead
    shards: VocabularyShards
    head, other, function, request, shards = ctx.rest
    wants_hidden, wants_weight, wants_bias = (upstream_N is not None and needed for needed in ctx.needs_input_grad[:3])
    size, num_tokens = request.chunk(len(head.weight), hidden_NH.device), len(hidden_NH)
    grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden and not 0 < num_tokens <= size else None
    grad_weight_VH = torch.zeros_like(head.weight) if wants_weight and not num_tokens else None
    grad_bias_V = torch.zeros_like(head.bias, dtype=torch.float32) if wants_bias and head.bias is not None else None
    values: list[Tensor] = []
    for start in range(0, num_tokens, size):
        span = slice(start, start + size)
        with torch.no_grad():
            logits_CV = shards.all_ids(head.logits(hidden_NH[span]))
            slope_CV = None
            if head.softcap and upstream_N is not None:
                slope_CV = 1.0 - (logits_CV / head.softcap).square_()
            own_CV, _ = _log_softmax(logits_CV, request.temperature, entropy=False)
            del logits_CV
            other_CH = other_hidden_NH[span].to(other.weight.dtype)
            other_CV, _ = _log_softmax(shards.all_ids(other.logits(other_CH)), request.temperature, entropy=False)
        if other_CV.shape != own_CV.shape:
            raise UnsupportedError(
                f"the models have vocabularies of {other_CV.shape[1]} and {own_CV.shape[1]} ids, which differ"
            )
        if upstream_N is None:
            with torch.no_grad():
                values.append(shards.all_tokens(function(other_CV, own_CV)))
            del own_CV, other_CV, slope_CV  # before the next chunk's logits exist
            continue
        with torch.enable_grad():
            values_C = function(other_CV, own_CV.requires_grad_())
        upstream_C = shards.own_tokens(upstream_N[span].to(values_C.dtype))
        (d_CV,) = torch.autograd.grad(values_C, own_CV, upstream_C)
        values.append(shards.all_tokens(values_C.detach()))
        del other_CV, values_C
        with torch.no_grad():
            d_CV = torch.addcmul(d_CV, own_CV.detach().exp_(), d_CV.sum(dim=1, keepdim=True), value=-1)
            del own_CV
            d_CV.mul_(head.scale / request.temperature)
            if slope_CV is not None:
                d_CV.mul_(slope_CV)
            d_CV = shards.own_ids(d_CV)
            if grad_bias_V is not None:
                grad_bias_V += d_CV.sum(dim=0)
            d_CV = d_CV.to(head.weight.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[span] = input_gradient(d_CV, head.weight)
            elif wants_hidden:
                grad_hidden_NH = input_gradient(d_CV, head.weight)
            if wants_weight:
                grad_weight_VH = _add_product(grad_weight_VH, d_CV, hidden_NH[span])
            del d_CV, slope_CV
    grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH.to(head.weight.dtype)
    grad_bias_V = None if grad_bias_V is None or head.bias is None else grad_bias_V.to(head.bias.dtype)
    values_N = torch.cat(values) if values else hidden_NH.new_zeros(0, dtype=torch.float32)
    return values_N, () if upstream_N is None else (grad_hidden_NH, grad_weight_VH, grad_bias_V)


def write_head(head: LinearHead, path: Path) -> None:
    """Write a head to a file of safetensors."""
    from safetensors.torch import save_file

    tensors = {"weight": head.weight.detach()} | ({} if head.bias is None else {"bias": head.bias.detach()})
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"scale": repr(head.scale), "softcap": repr(head.softcap)}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=numbers)


def read_head(path: str, device: torch.device) -> LinearHead:
    """The head that `write_head` wrote. Raises `CheckpointError` if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        # Read to the host: safetensors knows no device of other packages' platforms.
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 (no mapping)
            numbers = {name: float(value) for name, value in file.metadata().items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the other model's head cannot be read: {error}") from error
    return LinearHead(weight=tensors["weight"], bias=tensors.get("bias"), **numbers)


def _entropy(logp_CV: Tensor) -> Tensor:
    # 0 * -inf where a probability underflows: its contribution to the entropy is 0.
    return -(logp_CV.exp() * logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)).sum(dim=-1)


def _topk(logp_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not k:
        return logp_CV.new_zeros(0, 0), torch.zeros(0, 0, dtype=torch.int64, device=logp_CV.device)
    if k == 1:
        best_C, ids_C = first_choice(logp_CV)
        return best_C[:, None], ids_C[:, None]
    top = logp_CV.topk(min(k, logp_CV.shape[1]), dim=-1)
    return top.values, top.indices


def first_choice(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row, and the first column that has it: `logits_CV.max(dim=1)`.

    On the CPU, torch searches indices one element at a time but computes maxima with vector instructions. There the
    maxima of blocks select the block to search.
    """
    vocab_size = logits_CV.shape[1]
    block = 1 << (vocab_size.bit_length() // 2)
    if logits_CV.device.type != "cpu" or vocab_size < MANY_COLUMNS:
        best = logits_CV.max(dim=1)
        return best.values, best.indices
    num_blocked = vocab_size - vocab_size % block
    blocks_CBb = logits_CV[:, :num_blocked].view(len(logits_CV), num_blocked // block, block)
    at_C = blocks_CBb.amax(dim=2).argmax(dim=1)
    best_C, ids_C = blocks_CBb[torch.arange(len(at_C)), at_C].max(dim=1)
    ids_C += at_C * block
    if num_blocked < vocab_size:
        rest = logits_CV[:, num_blocked:].max(dim=1)
        later_C = rest.values > best_C
        best_C, ids_C = (
            torch.where(later_C, rest.values, best_C),
            torch.where(later_C, rest.indices + num_blocked, ids_C),
        )
    return best_C, ids_C


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        gather_ids_NK: Tensor | None,
        head: LinearHead,
        request: HeadRequest,
    ) -> tuple[Tensor | None, ...]:
        num_tokens, vocab_size = len(targets_N), weight_VH.shape[0]
        size = request.chunk(vocab_size, hidden_NH.device)
        needs_grad = any(ctx.needs_input_grad[:3])
        most_kept = kept_tokens(vocab_size, request.chunk_tokens) if needs_grad and not head.softcap else 0
        kept_logp: list[Tensor] = []
        chosen: list[Tensor] = []
        entropies: list[Tensor] = []
        tops: list[tuple[Tensor, Tensor]] = []
        gathered: list[Tensor] = []
        for start in range(0, num_tokens, size):
            span = slice(start, start + size)
            logp_CV, entropy_C = _log_softmax(head.logits(hidden_NH[span]), request.temperature, request.entropy)
            chosen.append(logp_CV.gather(1, targets_N[span, None])[:, 0])
            if request.entropy:
                entropies.append(_entropies(logp_CV) if entropy_C is None else entropy_C)
            if request.topk:
                tops.append(_topk(logp_CV, request.topk))
            if gather_ids_NK is not None:
                gathered.append(logp_CV.gather(1, gather_ids_NK[span]))
            if start + len(logp_CV) <= most_kept:
                kept_logp.append(logp_CV)
            del logp_CV  # before the next chunk's logits exist
        # Without any token the logprobs remain differentiable, because ranks that share a model run the backward pass
        # together. Outputs that are not requested are None: tensors would cost as much as a small product.
        k, entropy_N, top_NK, ids_NK, gathered_NK = min(request.topk, vocab_size), None, None, None, None
        constant: list[Tensor] = []

        def joined(parts: list[Tensor], *shape: int) -> Tensor:
            return torch.cat(parts) if parts else hidden_NH.new_zeros(0, *shape, dtype=torch.float32)

        logprobs_N = joined(chosen)
        if request.entropy:
            entropy_N = joined(entropies)
            constant += [] if request.entropy_grad else [entropy_N]
        if request.topk:
            top_NK = joined([top for top, _ in tops], k)
            ids_NK = torch.cat([ids for _, ids in tops]) if tops else targets_N.new_zeros(0, k)
            constant += [top_NK, ids_NK]
        if gather_ids_NK is not None:
            gathered_NK = joined(gathered, gather_ids_NK.shape[1])
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, entropy_N, gather_ids_NK)
        ctx.head, ctx.request, ctx.kept = head, request, kept_logp
        return logprobs_N, entropy_N, top_NK, ids_NK, gathered_NK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, entropy_N, gather_ids_NK = ctx.saved_tensors
        head: LinearHead = ctx.head
        request: HeadRequest = ctx.request
        grad_N, grad_entropy_N = grads[0], grads[1]
        if grad_N is None:
            grad_N = hidden_NH.new_zeros(len(targets_N), dtype=torch.float32)
        if not (request.entropy and request.entropy_grad):
            grad_entropy_N = None
        grad_gathered_NK = grads[4] if gather_ids_NK is not None else None
        if grad_gathered_NK is not None:
            # Every logprob subtracts p. The gradients of given ids are added to the target's, then moved to their ids.
            extra_N = grad_gathered_NK.sum(dim=1)
            grad_N = grad_N + extra_N
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        size, num_tokens = request.chunk(weight_VH.shape[0], hidden_NH.device), len(targets_N)
        # The gradient of an only chunk needs no copy, which would cost as much as a small vocabulary's product.
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden and not 0 < num_tokens <= size else None
        grad_weight_VH: Tensor | None = None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None
        for chunk_index, start in enumerate(range(0, num_tokens, size)):
            span = slice(start, start + size)
            slope_CV: Tensor | None = None
            if chunk_index < len(ctx.kept):
                logp_CV = ctx.kept[chunk_index]
                ctx.kept[chunk_index] = None
            else:
                logits_CV = head.logits(hidden_NH[span])
                if head.softcap:
                    slope_CV = 1.0 - (logits_CV / head.softcap).square_()
                logp_CV, _ = _log_softmax(logits_CV, request.temperature, entropy=False)
                del logits_CV
            d_CV = _d_logits(
                logp_CV,
                targets_N[span],
                grad_N[span],
                entropy_N[span] if grad_entropy_N is not None else None,
                grad_entropy_N[span] if grad_entropy_N is not None else None,
                head.scale / request.temperature,
            )
            if grad_gathered_NK is not None:
                places_CJ = torch.cat([targets_N[span, None], gather_ids_NK[span]], dim=1)
                moved_CJ = torch.cat([-extra_N[span, None], grad_gathered_NK[span]], dim=1)
                d_CV.scatter_add_(1, places_CJ, moved_CJ.mul_(head.scale / request.temperature))
            del logp_CV
            if slope_CV is not None:
                d_CV.mul_(slope_CV)
            if grad_bias_V is not None:
                grad_bias_V += d_CV.sum(dim=0)
            d_CV = d_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[span] = input_gradient(d_CV, weight_VH)
            elif wants_hidden:
                grad_hidden_NH = input_gradient(d_CV, weight_VH)
            if wants_weight:
                grad_weight_VH = _add_product(grad_weight_VH, d_CV, hidden_NH[span])
            del d_CV, slope_CV  # before the next chunk's logits exist
        if wants_weight:
            grad_weight_VH = torch.zeros_like(weight_VH) if grad_weight_VH is None else grad_weight_VH
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None and bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _log_softmax(logits_CV: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log probabilities, and entropies if requested and if they cost no further pass. Overwrites its argument."""
    if _compiled(logits_CV):
        return logits_CV, elementwise.log_softmax_(logits_CV, temperature, entropy=entropy)
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return torch.log_softmax(logits_CV, dim=-1), None


def _entropies(logp_CV: Tensor) -> Tensor:
    """Entropies of a chunk. To be called when its logits are freed."""
    rows = max(1, -(-len(logp_CV) // ENTROPY_PARTS))
    return torch.cat([_entropy(part_CV) for part_CV in torch.split(logp_CV, rows)])


def _compiled(logits_CV: Tensor) -> bool:
    """True if compiled kernels are available for these logits."""
    return logits_CV.device.type == "cpu" and elementwise is not None and elementwise.available()


def _add_product(total_VH: Tensor | None, d_CV: Tensor, hidden_CH: Tensor) -> Tensor:
    """Add `d.T @ hidden` to `total` in float32, in place if possible; None counts as zero.

    A single chunk's product keeps its dtype.
    """
    if total_VH is None:
        return weight_gradient(d_CV, hidden_CH)
    total_VH = total_VH.float()
    if d_CV.dtype == torch.float32 and len(d_CV) < HOST_MIN_ADDED:
        return total_VH.addmm_(d_CV.T, hidden_CH)
    return total_VH.add_(weight_gradient(d_CV, hidden_CH))


def _d_logits(
    logp_CV: Tensor,
    targets_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    factor: float,
) -> Tensor:
    """Gradient of the logits before scale and temperature, which `factor` accounts for. Overwrites `logp_CV`."""
    grad_C = grad_C * factor
    slope_C = grad_entropy_C * factor if grad_entropy_C is not None else None
    if _compiled(logp_CV):
        elementwise.logits_gradient_(logp_CV, targets_C, grad_C, slope_C, entropy_C)
        return logp_CV
    if entropy_C is None or slope_C is None:
        d_CV = logp_CV.exp_().mul_(-grad_C[:, None])
    else:
        p_CV = logp_CV.exp()
        # -(g + e * (log p + S)) * p, saving one pass over memory.
        d_CV = logp_CV.clamp_(min=NEVER).add_(entropy_C[:, None])
        d_CV = d_CV.mul_(-slope_C[:, None]).sub_(grad_C[:, None]).mul_(p_CV)
    return d_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
