"""The contract of infer strategies: token ids in, token ids and logprobs out, weights replaced while it runs.

Life of a strategy, all calls on one event loop:

    __init__(config) -> start(model, mesh) -> { generate* | abort | update_weights | sleep | wake }* -> stop()

`generate` may be called any number of times at once; the engine batches as it likes. Tokens drawn do not depend
on what else is in the batch where `params.seed` is set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.providers import InferCapabilities
    from roll_core.types import Completion, GenerateRequest, WeightManifest, WeightReceipt


MetricKind = Literal["sum", "mean", "max"]
"""How an engine's metric becomes one number where a role has several replicas."""


class InferStrategy(ABC):
    """One replica of an inference engine, in a worker of its own."""

    capabilities: InferCapabilities
    """The same that the provider's record declares."""

    metric_kinds: ClassVar[Mapping[str, MetricKind]] = MappingProxyType({})
    """Of those `metrics` that are no counts; what is not named here is added up over replicas."""

    def __init__(self, config: StrategyConfig) -> None:
        """Keep the configuration; touch no device."""
        self.config = config

    @abstractmethod
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Make the engine ready to generate. Weights are those of `model`, at version 0, until the first update."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Draw `request.n` outputs. Requests that enter in the same turn of the event loop are batched alike every
        time."""

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """End requests now. Their partial outputs are returned here and by their `generate` calls, with
        `finish_reason == "abort"`. Unknown and finished ids are ignored."""

    async def progress(self) -> list[Completion] | None:
        """What running requests have drawn so far, cut short (`finish_reason == "abort"`) unless an output is complete;
        nothing is ended. Asked every few seconds: it is what is left of them if this process dies, and tokens that are
        new are its signs of life. None, as by default, from an engine that does not tell: what it was drawing is drawn
        anew if it dies, and its answers alone show that it lives."""
        return None

    @abstractmethod
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Replace the weights in place and drop every cache that the old ones filled.

        `tensors` is read once, in manifest order, possibly on another thread, and its memory is the sender's: copy,
        unless `shared` (a transport within one process). Then the tensors themselves are used: live parameters of the
        trainer, or new ones (merged adapters, another dtype) that belong to the engine.
        `manifest` may lack digests (they are on their way); the receipt's digests are computed from what the engine
        holds *after* the update.

        With `capabilities.in_flight_update` requests go on under the new weights; otherwise the caller has none
        running.
        Raises `WeightSyncError` subclasses for what is missing, unexpected or of another shape, and whatever `tensors`
        raises. What is refused before the first of `tensors` is read (an older version, a manifest of another model)
        leaves the engine as it was. After that it may hold a part of each version: until an update succeeds, which the
        caller must see to, it draws nothing. Running requests stay where they are, new ones wait beside them, and
        `abort`, `progress`, `sleep` and `stop` work.
        """

    async def sleep(self) -> None:
        """Give device memory back, that of tensors which were shared with it too: nothing of them may be referred to.
        Called only if `capabilities.sleeps`, no request runs, and weights will be published before it is asked again;
        a sleeping engine sleeps on."""

    async def wake(self) -> None:
        """Take the memory again; weights need not survive: an update follows. Nothing to do for one that is awake."""

    def endpoint(self) -> str | None:
        """URL of the OpenAI-compatible server, if `capabilities.endpoint`."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """What the engine did since the last call, by name; a run shows it as `engine/<role>/<name>`.

        Names that engines share: `prompt_tokens` and `generated_tokens` that were computed; `running/mean` and
        `running/max`, sequences in a step; `waiting/max`; `kv_cache_usage/max`, from 0 to 1; `preemptions`;
        `prefix_cache_queries` and `prefix_cache_hits`, in tokens. A name is there whether or not anything happened.
        """
        return {}

    @abstractmethod
    async def stop(self) -> None:
        """End everything. Called once or several times, also after an error."""
