"""vLLM's end of a weight update, in each of the engine's processes: buckets in, layer after layer replaced in place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_infer_vllm.held import remember_unreadable
from roll_infer_vllm.workarounds import pack_tied_heads
from roll_modeling.buckets import BucketInfo, read_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to mypy
    """There is nothing to agree on beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """See `BucketInfo`."""

    num_bytes: int
    tensors: list[Any] = field(default_factory=list)
    path: str = ""
    handles: dict[str, str] = field(default_factory=dict)


class BucketTransfer(WeightTransferEngine[Nothing, Bucket]):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Loads Hugging Face tensors by the model's own loader: each process takes its part of each."""

    init_info_cls = Nothing
    update_info_cls = Bucket

    failure = ""
    """Why a bucket of this update could not be loaded, if one could not."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """From here on tensors are kept until their layer is complete, and then replace it."""
        self.failure = ""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take in one bucket. When this returns the bucket may be filled again.

        Raises nothing, but says so in `failure`: of a call that raises in one of several processes vLLM takes the
        answers of the others for those to its next call.
        """
        if self.failure:
            return
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # whatever it is that the model's loader says; the worker raises it
            self.failure = f"{type(error).__name__}: {error}"

    def receive_weights(self, update_info: Bucket) -> None:
        """See `update_weights`."""
        self.model.load_weights(self._tensors(BucketInfo(**asdict(update_info))))

    def finish_weight_update(self) -> None:
        """Process layers that came incomplete (padded ones) and put everything back in its place."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""

    def _tensors(self, bucket: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_bucket(bucket, str(self.device)):
            if self.device.type == "cpu":
                remember_unreadable(self.model, name, tensor)
            yield name, tensor.to(self.device)
