"""The ends of `benchmarks/sync.py`: trainers and engines whose digests can be switched.

`NamedTensors` ends are as simple as can be, so that what remains is the transport. `Real` ends are the runtime's own
workers around `hf_train` and the embedded engine: what is timed then is what a run waits for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.runtime.weights.transfer import ReceivingWorker, SendingWorker, WeightReceiver, WeightSender
from roll_core.runtime.workers.infer import InferWorker
from roll_core.runtime.workers.train import TrainWorker
from roll_core.spec import weights
from roll_core.types import DataRank, WeightReceipt
from roll_kernels.digests import compiled_leaves_of, library

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from roll_core.runtime.cluster.executors.base import Place
    from roll_core.spec.weights import Bytes
    from roll_core.types import WeightManifest

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 768, 2048, 11, 32_000
MODEL = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder of 102 M parameters with tied embeddings."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"model.layers.{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def plain_copy(held: Bytes, source: Bytes | None) -> bytes:
    """What is done where nobody asks for a proof."""
    if source is not None:
        np.copyto(held, source)
    return b""


LEAVES = {"fused": compiled_leaves_of, "separate": weights.leaves_of, "none": plain_copy}
"""How digests are computed: in the pass that copies, in one of their own, not at all."""


class Switch:
    """What all ends have for the benchmark."""

    def digests(self, which: str) -> None:
        """From the next publish on."""
        library()
        weights.set_leaf_function(LEAVES[which])

    def cpu_s(self) -> float:
        """CPU time of its process so far."""
        return time.process_time()


class NamedTensorsTrainer(Switch, SendingWorker):
    """A train worker and its strategy in one."""

    def __init__(self, *, place: Place, peers: Any, dtype: str) -> None:
        import torch

        torch.set_num_threads(place.num_threads)
        self.data_rank = DataRank()
        self.tensors = _tensors(dtype)
        self.sender = WeightSender(self, role="actor_train", rank=place.rank)  # type: ignore[arg-type]

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The very tensors."""
        yield from self.tensors.items()

    def export_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """None."""
        return iter(())

    def frozen_weights(self) -> tuple[str, ...]:
        """None."""
        return ()

    def step(self) -> None:
        """So that there is something new to publish."""
        for tensor in self.tensors.values():
            tensor.add_(0.01)

    def pointers(self) -> dict[str, int]:
        """Where the tensors lie."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Hang up."""
        self.sender.close()


class NamedTensorsEngine(Switch, ReceivingWorker):
    """An infer worker and its strategy in one."""

    def __init__(self, *, place: Place, peers: Any, dtype: str) -> None:
        import torch

        torch.set_num_threads(place.num_threads)
        self.tensors = _tensors(dtype)
        self.receiver = WeightReceiver(self, role="actor_infer", rank=place.rank)  # type: ignore[arg-type]

    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Copies, or holds what is shared."""
        if shared:
            self.tensors = dict(tensors)
            return weights.make_receipt(manifest, self.tensors.items())
        digests = {name: weights.copy_digested(self.tensors[name], tensor) for name, tensor in tensors}
        return WeightReceipt(version=version, digests=digests)

    def pointers(self) -> dict[str, int]:
        """Where the tensors lie."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Hang up."""
        self.receiver.close()


class RealTrainer(Switch, TrainWorker):
    """The runtime's worker."""


class RealEngine(Switch, InferWorker):
    """The runtime's worker."""


def _tensors(dtype: str) -> dict[str, Tensor]:
    import torch

    return {name: torch.full(shape, 0.5, dtype=weights.torch_dtype(dtype)) for name, shape in shapes()}
