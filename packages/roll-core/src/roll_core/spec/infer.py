"""The interface of infer strategies: token ids in, token ids and logprobs out, weights replaceable at run time.

Order of calls, all on one event loop:

    __init__(config) -> start(model, mesh) -> { generate* | abort | update_weights | sleep | wake }* -> stop()

`generate` may be called concurrently any number of times; the engine chooses the batches. If `params.seed` is set,
sampled tokens do not depend on the rest of the batch. Requests, sampling parameters and completions are those of
`roll_core.types`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from roll_core.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, Media, TokenIds, WeightManifest, WeightReceipt


MetricKind = Literal["sum", "mean", "max"]
"""How to combine a metric over the replicas of a role."""


class InferStrategy(ABC):
    """One replica of an inference engine, in its own worker."""

    metric_kinds: ClassVar[Mapping[str, MetricKind]] = MappingProxyType({})
    """How to combine `metrics` that are not counts. Metrics not listed here are summed over replicas."""

    def __init__(self, config: StrategyConfig) -> None:
        """Keep the configuration; do not touch devices."""
        self.config = config

    @abstractmethod
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Start the engine. Until the first update it has the weights of `model`, at version 0."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample `request.n` outputs. Requests submitted in the same iteration of the event loop are always batched in
        the same way.

        An output is partial, with `finish_reason == "abort"`, only after `abort`. Raise for a request that cannot be
        completed.
        """

    @abstractmethod
    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Stop requests now. This call and their `generate` calls return the partial outputs, with `finish_reason ==
        "abort"`. Unknown and finished ids are ignored."""

    async def progress(self) -> list[Completion] | None:
        """Partial outputs of running requests, with `finish_reason == "abort"` unless an output is complete. Stops
        nothing.

        Called every few seconds. New tokens count as a heartbeat. If the process exits, requests resume from the last
        reported tokens. None (the default) if the engine does not report progress: its requests are then regenerated
        after a crash, and only completed responses count as a heartbeat.
        """
        return None

    @abstractmethod
    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Replace the weights in place and invalidate every cache computed with the old weights.

        `tensors` is read once, in manifest order, possibly on another thread. The sender owns their memory, so copy
        them, unless `shared` is set (transport within one process). With `shared`, use the tensors themselves: live
        parameters of the trainer, or new tensors (merged adapters, another dtype) that the engine then owns. `manifest`
        may lack digests that are not computed yet. Compute the receipt's digests from the engine's weights *after* the
        update, with the function that the manifest names, as `roll_core.spec.weights.make_receipt` does.

        With `capabilities.keeps_weights`, tensors of `manifest.unsent` keep their values. The receipt has the digests
        with which the engine loaded them. Raise `MissingTensorError`, and change nothing, if it has no digest of one:
        no update contained it since the start, the last `sleep` or a failed update.

        With `capabilities.in_flight_update`, running requests continue with the new weights. Otherwise the caller
        ensures that none are running.

        Raises `WeightSyncError` subclasses for missing or unexpected tensors and wrong shapes, and whatever `tensors`
        raises. If the update is rejected before the first tensor is read (older version, manifest of another model),
        the engine is unchanged. After that a failed update may leave weights of both versions. The engine then
        generates nothing until an update succeeds, which is the caller's responsibility. Meanwhile running requests
        stay, new requests queue, and `abort`, `progress`, `sleep` and `stop` work.
        """

    async def activations(self, tokens: TokenIds, media: tuple[Media, ...] = ()) -> Mapping[str, Tensor]:
        """Activations `[L, W]` of a prefill of `tokens` `[L]`, float32 on the host, by point as in
        `TrainStrategy.activations`. Those of an image encoder have a row for each patch.

        Called while no request runs, only with `capabilities.activations`.
        """
        raise UnsupportedError(f"{type(self).__name__} returns no activations")

    async def loaded_weights(self) -> Mapping[str, Tensor]:
        """Copies of the weights that the engine computes with, by Hugging Face name. Only with
        `capabilities.activations`."""
        raise UnsupportedError(f"{type(self).__name__} does not return its weights")

    async def sleep(self) -> None:
        """Release device memory, including that of shared tensors: keep no reference to them. No effect if already
        asleep.

        Called only with `capabilities.sleeps` and while no request runs. Weights are published again before the next
        request.
        """

    async def wake(self) -> None:
        """Allocate device memory again. Weights may be lost, since an update follows. No effect if already awake."""

    def endpoint(self) -> str | None:
        """URL of the OpenAI-compatible server if `capabilities.endpoint`, otherwise None."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Engine metrics since the last call, by name. A run reports them as `engine/<role>/<name>`.

        Names common to engines: `prompt_tokens` and `generated_tokens`, computed tokens; `running/mean` and
        `running/max`, sequences per step; `waiting/max`; `kv_cache_usage/max`, from 0 to 1; `preemptions`;
        `prefix_cache_queries` and `prefix_cache_hits`, in tokens. Every name is always present, also if nothing
        happened.
        """
        return {}

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine and release everything. May be called more than once, also after an error."""


class InferFollower(ABC):
    """Part of an engine replica on a further node, in its own worker. The strategy on the first node drives it.

    Order of calls, all on one event loop: `__init__(config) -> start(model, mesh) -> check()* -> stop()`. The run
    starts all parts of a replica together, and replaces all of them if one exits.
    """

    def __init__(self, config: StrategyConfig) -> None:
        """Keep the configuration; do not touch devices."""
        self.config = config

    @abstractmethod
    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Start the engine processes of this node, which meet the others as `mesh.part` tells."""

    @abstractmethod
    async def check(self) -> None:
        """Raise `EngineDiedError` if an engine process of this node exited. Called every second."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine processes of this node. Idempotent."""


def check_request(
    request: GenerateRequest,
    *,
    vocab_size: int,
    max_tokens: int,
    limit: str,
    routed_experts: bool = False,
    has_tokenizer: bool = True,
    images: bool = False,
) -> None:
    """Validate a request before it is queued. `Processor.check` validates its images.

    `max_tokens` is the maximum length of prompt and response together. `limit` describes it in the message, for example
    "the model's 4096 positions". `routed_experts`: the engine was started to return the experts it chose.
    `has_tokenizer`: the role's model has the tokenizer that stop strings need. `images`: engine and model read images.

    Raises `DataError` for a request that is invalid for every engine. Raises `UnsupportedError` if the request needs
    `routed_experts`, a tokenizer or `images`, and the engine has none.
    """
    import numpy as np

    params, prompt, name = request.params, np.asarray(request.prompt_ids), f"request {request.id!r}"
    if prompt.ndim != 1 or len(prompt) == 0:
        raise DataError(f"{name}: the prompt is empty, expected at least one token (for example bos)")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise DataError(f"{name}: prompt_ids are {prompt.dtype}, expected integers")
    wrong = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if len(wrong):
        raise DataError(
            f"{name}: prompt token {int(wrong[0])} is id {int(prompt[wrong[0]])}, but the model's vocabulary has"
            f" {vocab_size}; does the tokenizer belong to the model?"
        )
    if request.routed_experts and not routed_experts:
        raise UnsupportedError(f"{name}: routed_experts is set, but the engine was started without router replay")
    if request.media and not images:
        raise UnsupportedError(f"{name}: it has {len(request.media)} images, but this engine and model read text alone")
    if request.n < 1:
        raise DataError(f"{name}: n is {request.n}, expected at least 1")
    if not 0 <= request.prompt_topk <= vocab_size:
        raise DataError(
            f"{name}: prompt_topk is {request.prompt_topk}, expected 0 to {vocab_size}, the vocabulary's size"
        )
    if params.max_new_tokens < 0:
        raise DataError(f"{name}: max_new_tokens is {params.max_new_tokens}, expected at least 0")
    total = len(prompt) + params.max_new_tokens
    if total > max_tokens:
        raise DataError(
            f"{name}: {len(prompt)} prompt tokens + max_new_tokens {params.max_new_tokens} = {total} are more than"
            f" {limit}"
        )
    foreign = [token_id for token_id in params.stop_token_ids if not 0 <= token_id < vocab_size]
    if foreign:
        raise DataError(f"{name}: stop_token_ids has {foreign[0]}, expected ids of the vocabulary, below {vocab_size}")
    ranges: tuple[tuple[str, bool, str], ...] = (
        ("temperature", params.temperature >= 0 and bool(np.isfinite(params.temperature)), "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= params.min_p <= 1, "between 0 and 1"),
        ("repetition_penalty", params.repetition_penalty > 0, "above 0"),
    )
    for key, valid, expected in ranges:
        if not valid:
            raise DataError(f"{name}: {key} is {getattr(params, key)}, expected {expected}")
    if params.stop and not params.ignore_eos:
        if not all(params.stop):
            raise DataError(f"{name}: a stop string is empty, which would end every response at once")
        if not has_tokenizer:
            message = "stop strings need a tokenizer, and this role's model has none; use stop_token_ids"
            raise UnsupportedError(f"{name}: {message}")
