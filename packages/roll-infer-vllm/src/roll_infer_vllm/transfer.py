"""Receiver of weight updates in each engine process: reads buckets and replaces weights in place, layer by layer."""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from roll_infer_vllm import experts
from roll_infer_vllm.loaded_model import ROUTER_BUFFER, VllmModel, remember_decay, remember_unreadable
from roll_infer_vllm.workarounds import (
    COPIED_SINKS,
    load_sinks,
    name_partial_loaders,
    pack_experts_again,
    pack_tied_heads,
    restore_activation_constants,
)
from roll_modeling.engine_experts import ExpertName
from roll_modeling.engine_weights import ExpertsTensor, LoadedTensor
from roll_weight_transports.buckets import BucketInfo, read_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass
class NoSetup(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Empty initialization info: the transfer needs no setup."""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Update info with the fields of `BucketInfo`, and the bucket itself if it comes from another node."""

    num_bytes: int
    tensors: list[Any] = field(default_factory=list)
    path: str = ""
    handles: dict[str, str] = field(default_factory=dict)
    content: bytes = b""


class BucketTransfer(WeightTransferEngine[NoSetup, BucketUpdate]):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Weight transfer engine that loads Hugging Face tensors with the model's loader; each process loads its shard."""

    init_info_cls = NoSetup
    update_info_cls = BucketUpdate

    failure = ""
    """Error message of the first bucket of this update that could not be loaded; empty if there is none."""

    def init_transfer_engine(self, init_info: NoSetup) -> None:
        """Do nothing: the transfer needs no setup."""

    def start_weight_update(self) -> None:
        """Start an update: tensors are buffered until their layer is complete, and then replace it."""
        self.failure = ""
        # vLLM warns of each layer that an update does not contain; those were compared with the manifest before.
        logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
        if self.device.type == "cpu":
            pack_experts_again(self.model)
        name_partial_loaders(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The sender may reuse the bucket after this returns.

        Stores errors in `failure` instead of raising them. If a call raises in one of several processes, vLLM mistakes
        the results of the other processes for those of its next call.
        """
        if self.failure:
            return
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # any error of the model's loader; the worker raises it
            self.failure = f"{type(error).__name__}: {error}"

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Load the tensors of one bucket; see `update_weights`."""
        loaded = VllmModel(self.model, str(self.device))
        with _opened(update_info) as bucket:
            self.model.load_weights(self._others(loaded, bucket))

    def finish_weight_update(self) -> None:
        """Finish an update: process layers that stayed incomplete (padded ones) and restore the model's structure."""
        finalize_layerwise_reload(self.model, self.model_config)
        restore_activation_constants(self.model)
        if self.device.type == "cpu":
            pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    def _others(self, loaded: VllmModel, bucket: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        """Load the bucket's experts; yields the other tensors, by the names that the model's loader knows.

        Loaders of models do not agree on names of experts; that of `RoutedExperts` has none.
        """
        for name, tensor in read_bucket(bucket, str(self.device)):
            if ExpertName.parse(name) is not None:
                if isinstance(target := loaded.locate(name), ExpertsTensor):
                    experts.load(target, tensor.to(self.device))
                continue
            if name.endswith(".sinks") and loaded.model_type in COPIED_SINKS:
                load_sinks(loaded.locate(name), tensor.to(self.device))
                continue
            if name.endswith(ROUTER_BUFFER) and isinstance(target := loaded.locate(name), LoadedTensor):
                stored = getattr(target.module, target.parameter)
                if not isinstance(stored, Parameter):  # the loaders of models of transformers skip buffers
                    stored.copy_(tensor)
                    continue
            if self.device.type == "cpu":
                remember_unreadable(self.model, name, tensor)
            remember_decay(self.model, name, tensor)
            yield loaded.sent_name(name), tensor.to(self.device)


@contextmanager
def _opened(update: BucketUpdate) -> Iterator[BucketInfo]:
    """The bucket in memory that this process can open."""
    fields = {field.name: getattr(update, field.name) for field in dataclasses.fields(BucketInfo)}
    if not update.content:
        yield BucketInfo(**fields)
        return
    descriptor = os.memfd_create("roll-bucket")
    with os.fdopen(descriptor, "wb") as file:
        file.write(update.content)
        file.flush()
        yield BucketInfo(**{**fields, "path": f"/proc/self/fd/{descriptor}"})
