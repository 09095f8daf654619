"""Receiver of weight updates in each engine process.

SGLang calls `act` (its argument `custom_weight_loader`) with the model and a list of named tensors. The list has one
empty tensor, whose name is a JSON message of the worker. The result is written to a file, for two reasons: SGLang's own
response contains no result, and an exception raised here would end the engine.

    compare           compare names and shapes of a manifest with the model, before anything changes
    open              test opening a bucket on the engine's devices
    load              load one bucket with the model's own loader; each process takes its shard of each tensor
    digest            digests of the loaded weights, read back
    compare adapter   compare an adapter's manifest with the model; SGLang loads adapters by itself
    digest adapter    digests of the loaded adapter, read back
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
    """Run the action of the message and write its result, or the error, to the file of this rank."""
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
    """Compare the manifest's names and shapes with this process's model: different, unknown and missing tensors."""
    return compare(message["tensors"], lambda name: locate(model, name), parts(model))


def load(model: Any, message: dict[str, Any], rank: int) -> None:
    """Load one bucket. The sender may reuse the bucket after this returns."""
    model.load_weights(list(read_bucket(BucketInfo(**message["bucket"]), _device_of(model))))


def open_bucket(model: nn.Module, message: dict[str, Any], rank: int) -> str:
    """Reason why this process cannot open a bucket on its device; empty if it can."""
    return opening_failure(BucketInfo(**message["bucket"]), _device_of(model))


def _device_of(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


def digests(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, str]:
    """Digests of these tensors, as the engine computes with them. Only rank 0 returns them, of the gathered tensors."""
    found = {}
    for name in message["tensors"]:
        whole = locate(model, name).whole()
        if rank == 0:
            found[name] = digest(whole)
    return found


def compare_announced_adapter(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, Any]:
    """Compare an adapter's names and shapes with this process's buffers; lists the `partners` that SGLang needs too."""
    from roll_infer_sglang.held_adapter import buffer, partners

    found = compare_adapter(message["tensors"], lambda name: tuple(buffer(model, name).shape))
    if found["unknown"]:
        return found
    return found | {"partners": list(partners(model, [name for name, _ in message["tensors"]]))}


def adapter_digests(model: nn.Module, message: dict[str, Any], rank: int) -> dict[str, str]:
    """Digests of an adapter's tensors, as the engine computes with them."""
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
