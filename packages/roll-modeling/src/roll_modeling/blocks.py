"""How the repeated blocks of a model are computed: recomputed in the backward pass, from inputs on the host, compiled.

    block.forward = inputs to the host { checkpoint { compiled { the block's own forward } } }

Shapes: T flat tokens, H hidden size.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_core.errors import ModelError
from roll_modeling import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Literal

BACKEND = "inductor"
"""Backend of `torch.compile`."""
KEPT = re.compile(r"aten::(mm|addmm|_grouped_mm)|mkldnn::_linear_pointwise|\w+::\w*(attention|attn)\w*")
"""Names of operators whose outputs selective recomputation keeps: products with weights, and attention.

Not `bmm`, which is also the product of attention scores, `[heads, T, T]`.
"""


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Layers of a model of transformers. Raises `ModelError` if the model does not mark them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be recomputed or compiled; set"
            " disable_gradient_checkpointing: true, and remove torch_compile"
        )
    return blocks


def prepare_blocks(
    blocks: Iterable[nn.Module],
    *,
    recomputation: Literal["full", "selective"] | None,
    offload_from: torch.device | None = None,
    compiled: bool = False,
) -> None:
    """Replace the `forward` of each block, which its hooks (sharding, adapters) surround.

    With `recomputation`, a block saves its inputs for the backward pass and recomputes the rest. `selective` also saves
    the outputs of operators in `KEPT`. Random numbers are not repeated, so blocks must use none, as in evaluation mode.
    With `offload_from`, the inputs on this device wait in pinned host memory.

    `compiled` blocks have symbolic lengths, so that one compilation serves all microbatches. Attention over flat tokens
    runs between compiled parts, because it depends on the length of each sequence.
    """
    if compiled:
        attention.register_untraced()
    for block in blocks:
        forward = block.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True, backend=BACKEND)
        if recomputation is not None:
            forward = _recomputed(forward, recomputation, offload_from)
        block.forward = forward


def inputs_on_host(device: torch.device | None) -> AbstractContextManager[Any]:
    """Keep tensors on `device` that autograd saves in this context in pinned host memory. No effect on a CPU.

    Copies in both directions are queued on the device, so that the host does not wait for them.
    """
    if device is None or device.type == "cpu":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device.type)


def _recomputed(
    forward: Callable[..., Any], recomputation: Literal["full", "selective"], offload_from: torch.device | None
) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recomputation == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A checkpoint saves positional tensors as autograd does, which can offload them, and holds on to named ones.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        named, number = [kwargs.pop(name) for name in names], len(args)

        def positional(*inputs: Any) -> Any:  # without a reference to `args`, which would keep them on the device
            return forward(*inputs[:number], **kwargs, **dict(zip(names, inputs[number:], strict=True)))

        with inputs_on_host(offload_from):
            return checkpoint(positional, *args, *named, **options)

    return recomputed


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_kept(operator: Any) -> bool:
    return KEPT.fullmatch(operator.name().partition(".")[0]) is not None
