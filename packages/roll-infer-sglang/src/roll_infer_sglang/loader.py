"""SGLang's end of a weight update, in each of the engine's processes.

SGLang calls `act` (its argument `custom_weight_loader`) with the model and "tensors", of which the only one is empty
and named by a message of ours. The answer goes into a file, as SGLang's own says only whether something was raised, and
what is raised here would end the engine.

    compare           names and shapes of a manifest against the model, before anything is touched
    open              a bucket on the engine's devices, to see whether that works
    load              one bucket, by the model's own loader: each process takes its part of each tensor
    digest            of what is held, read back
    compare adapter   the same for a manifest of an adapter, which SGLang loads by itself,
    digest adapter    and for what it then holds
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_parallel

from roll_core.spec.weights import digest
from roll_infer_sglang.held import locate, parts
from roll_modeling.adapter_updates import compare_adapter
from roll_modeling.buckets import BucketInfo, opening_failure, read_bucket
from roll_modeling.comparing import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def act(model: nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Do what the message says, and answer."""
    import torch

    message = json.loads(named_tensors[0][0])
    rank = get_parallel().tp_rank
    try:
        with torch.no_grad():
            answer = {"done": ACTS[message["act"]](model, message, rank)}
    except Exception as error:  # the worker raises it
        answer = {"error": f"{type(error).__name__}: {error}"}
    path = os.path.join(message["answers"], str(rank))
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(f"{path}.part", path)


def compare_announced(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, Any]:
    """What of the manifest's names and shapes this process has otherwise, does not have, and misses."""
    return compare(message["tensors"], lambda name: locate(model, name), parts(model))


def load(model: Any, message: dict[str, Any], rank: int) -> None:
    """Take in one bucket. When this is answered the bucket may be filled again."""
    model.load_weights(list(read_bucket(BucketInfo(**message["bucket"]), _device_of(model))))


def open_bucket(model: nn.Module, message: dict[str, Any], rank: int) -> str:
    """Why this process cannot read a bucket on its device, if it cannot."""
    return opening_failure(BucketInfo(**message["bucket"]), _device_of(model))


def _device_of(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


def digests(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, str]:
    """Of these tensors, as the engine computes with them; the first rank answers for all."""
    found = {}
    for name in message["tensors"]:
        whole = locate(model, name).whole()
        if rank == 0:
            found[name] = digest(whole)
    return found


def compare_announced_adapter(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, Any]:
    """What of the manifest's names and shapes this process has no room for, and what SGLang wants beside them."""
    from roll_infer_sglang.held_adapter import buffer, partners

    found = compare_adapter(message["tensors"], lambda name: tuple(buffer(model, name).shape))
    if found["unknown"]:
        return found
    return found | {"partners": list(partners(model, [name for name, _ in message["tensors"]]))}


def adapter_digests(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, str]:
    """Of an adapter's tensors, as the engine computes with them."""
    from roll_infer_sglang.held_adapter import held

    return {name: digest(held(model, name, shape)) for name, shape in message["tensors"]}


ACTS: dict[str, Callable[[Any, dict[str, Any], int], Any]] = {
    "compare": compare_announced,
    "load": load,
    "open": open_bucket,
    "digest": digests,
    "compare adapter": compare_announced_adapter,
    "digest adapter": adapter_digests,
}
