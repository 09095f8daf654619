"""Worker of one replica of a generating role: an infer strategy and its running requests."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from roll_core.data.modelscope import with_local_files
from roll_core.errors import InvalidCompletionError, RollError
from roll_core.host import free_port
from roll_core.runtime.cluster.concurrency import cancel_all
from roll_core.runtime.cluster.executors.base import retrieve
from roll_core.runtime.cluster.memory_use import MemoryUse, MemoryWatch
from roll_core.runtime.weights.plan import device_facts
from roll_core.runtime.weights.transfer import ReceivingWorker, WeightReceiver
from roll_core.runtime.workers.strategy import make_strategy, mesh_info, model_vocab_size
from roll_core.spec.platform import HOST_BACKEND, HOST_DEVICE
from roll_core.types import Completion, CompletionOutput, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.spec.infer import InferFollower, InferStrategy, MetricKind
    from roll_core.spec.model import ModelSpec, ReplicaPart
    from roll_core.spec.providers import InferProvider
    from roll_core.spec.transport import DeviceFacts
    from roll_core.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Metrics of one replica, and how to aggregate them over replicas."""

    values: Mapping[str, float]
    kinds: Mapping[str, MetricKind]


def join_readings(readings: Sequence[EngineReading]) -> dict[str, float]:
    """Aggregate the metrics of a role's replicas. A mean is over the replicas that report it."""
    values_by_name: dict[str, list[float]] = {}
    kinds: dict[str, MetricKind] = {}
    for reading in readings:
        kinds.update(reading.kinds)
        for name, value in reading.values.items():
            values_by_name.setdefault(name, []).append(float(value))
    join: dict[MetricKind, Callable[[list[float]], float]] = {"sum": sum, "mean": fmean, "max": max}
    return {name: join[kinds.get(name, "sum")](values) for name, values in values_by_name.items()}


@dataclass(eq=False, slots=True)
class SubmittedRequest:
    """A submitted request whose result was not returned yet."""

    request: GenerateRequest
    task: asyncio.Task[Completion]
    aborted: bool = False
    """True if the worker aborted it, so that its outputs may be partial."""


class InferWorker(ReceivingWorker):
    """Worker of one replica.

    The executor constructs it in the worker's process; methods run on its event loop and may overlap.
    """

    def __init__(
        self,
        *,
        place: Place,
        peers: Peers,
        role: str,
        provider: InferProvider,
        strategy_config: Mapping[str, Any],
        model: ModelSpec,
        backend: str,
        timeout_s: float,
        owner: str,
    ) -> None:
        """`owner` names the strategy and its package in errors."""
        self.model = model = with_local_files(model)
        self.strategy: InferStrategy = make_strategy(provider, strategy_config, owner=owner)
        mesh = mesh_info(role, place, peers, backend=backend, timeout_s=timeout_s)
        self.mesh = replace(mesh, sampling_seed=secrets.randbits(63))
        on_device = provider.capabilities.device_weights
        self.weights_on = (place.device, backend) if on_device else (HOST_DEVICE, HOST_BACKEND)
        self.receiver = WeightReceiver(self.strategy, role=role, rank=place.rank, device=self.weights_on[0])
        self.owner, self.vocab_size = owner, model_vocab_size(model)
        self.running: dict[str, SubmittedRequest] = {}
        """By request id."""
        self.leaving: dict[str, asyncio.Task[Completion]] = {}
        """Tasks of forgotten requests that the engine has not ended yet, by request id."""
        self.sleep_lock = asyncio.Lock()
        """Serializes `sleep` and `wake`.

        A call after its deadline may still be putting the engine to sleep when the next call wakes it.
        """

    async def free_port(self) -> int:
        """A free port of this host, where the parts of a replica over several nodes meet."""
        return free_port()

    async def start(self, part: ReplicaPart | None = None) -> None:
        """Start the engine, or its first part if the replica is on several nodes."""
        self.watch = MemoryWatch(self.mesh.device)
        if part is not None:
            self.mesh = replace(self.mesh, part=part, sampling_seed=part.sampling_seed)
        await self.strategy.start(self.model, self.mesh)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start `requests` together in one iteration of the event loop, so that their batching is reproducible.

        Raises `RollError` if a request with the same id is running.
        """
        for request in requests:
            if request.id in self.running:
                raise RollError(f"request {request.id} is already running")
            earlier = self.leaving.get(request.id)
            generate = self.strategy.generate(request) if earlier is None else self._generate_after(earlier, request)
            self.running[request.id] = SubmittedRequest(request, asyncio.create_task(generate))

    async def _generate_after(self, earlier: asyncio.Task[Completion], request: GenerateRequest) -> Completion:
        """Generate once a forgotten request of the same id has ended: engines refuse two with one id."""
        await asyncio.wait([earlier])
        return await self.strategy.generate(request)

    async def result(self, request_id: str) -> Completion:
        """Wait for a submitted request and return its completion.

        The request is then removed: call this once per request.
        """
        running = self.running[request_id]
        try:
            completion = self._checked(await running.task, running.request)
        finally:
            # `forget` may have removed it meanwhile, and a new request may have its id.
            if self.running.get(request_id) is running:
                del self.running[request_id]
        if not running.aborted and any(output.finish_reason == "abort" for output in completion.outputs):
            raise InvalidCompletionError(  # to continue it could take forever: the engine may do so again
                f"{self.owner}: the completion of request {request_id!r} has finish_reason 'abort', but nothing aborted"
                " the request: raise an error if the engine cannot complete it"
            )
        return completion

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort requests. Their `result` returns the partial completion."""
        await asyncio.sleep(0)  # requests submitted in this iteration of the event loop reach the engine first
        await self._abort(ids)

    async def _abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if id in self.running:
                self.running[id].aborted = True
        await self.strategy.abort(ids)

    async def progress(self) -> list[Completion] | None:
        """Partial completions of running requests; None if the engine does not report them."""
        completions = await self.strategy.progress()
        if completions is None:
            return None
        if not isinstance(completions, list) or not all(
            isinstance(completion, Completion) for completion in completions
        ):
            raise InvalidCompletionError(
                f"{self.owner}: progress() returned {_shown(completions)}, expected Completions"
            )
        return [
            self._checked(completion, self.running[completion.id].request)
            for completion in completions
            if completion.id in self.running
        ]

    async def forget(self, ids: Sequence[str]) -> None:
        """Cancel requests whose `result` will not be awaited."""
        for id in ids:
            if id in self.running:
                task = self.running.pop(id).task
                self.leaving.setdefault(id, task)  # one that waits for an earlier one is not in the engine
                task.cancel()
                task.add_done_callback(retrieve)
                task.add_done_callback(partial(self._left, id))

    def _left(self, id: str, task: asyncio.Task[Completion]) -> None:
        if self.leaving.get(id) is task:
            del self.leaving[id]

    def _checked(self, completion: Completion, request: GenerateRequest) -> Completion:
        if problem := completion_problem(completion, request, vocab_size=self.vocab_size):
            raise InvalidCompletionError(f"{self.owner}: invalid completion of request {request.id!r}: {problem}")
        return completion

    async def sleep(self) -> None:
        """Put the engine to sleep, which frees the device's memory.

        First aborts all running requests, for example those of a cancelled evaluation, which no caller awaits.
        """
        async with self.sleep_lock:
            await self._abort(list(self.running))
            await asyncio.gather(*(running.task for running in self.running.values()), return_exceptions=True)
            self.running.clear()
            await self.strategy.sleep()

    async def wake(self) -> None:
        """Wake the engine, which allocates the device's memory again."""
        async with self.sleep_lock:
            await self.strategy.wake()

    async def device_facts(self) -> DeviceFacts:
        """Device and backend on which the engine receives weights."""
        return device_facts(*self.weights_on)

    async def endpoint(self) -> str | None:
        """URL of the engine's OpenAI-compatible server; None if it has none."""
        return self.strategy.endpoint()

    async def metrics(self) -> EngineReading:
        """Metrics of the engine since the last call."""
        return EngineReading(values=dict(self.strategy.metrics()), kinds=dict(self.strategy.metric_kinds))

    async def memory_use(self) -> MemoryUse | None:
        """Memory of this process since `start`. Engines with processes of their own use more memory there."""
        return self.watch.use()

    async def close(self) -> None:
        """Stop the engine and cancel its running requests."""
        await cancel_all(running.task for running in self.running.values())
        self.receiver.close()
        await self.strategy.stop()


class FollowerWorker:
    """Worker on a further node of a replica. The strategy on the first node drives its engine processes."""

    def __init__(
        self,
        *,
        place: Place,
        peers: Peers,
        role: str,
        provider: InferProvider,
        strategy_config: Mapping[str, Any],
        model: ModelSpec,
        backend: str,
        timeout_s: float,
        owner: str,
    ) -> None:
        """As for `InferWorker`."""
        self.model, self.mesh = (
            with_local_files(model),
            mesh_info(role, place, peers, backend=backend, timeout_s=timeout_s),
        )
        self.follower: InferFollower = make_strategy(
            replace(provider, target=provider.follower), strategy_config, owner=owner
        )

    async def start(self, part: ReplicaPart) -> None:
        """Start this part of the engine; returns when all parts have met."""
        await self.follower.start(self.model, replace(self.mesh, part=part, sampling_seed=part.sampling_seed))

    async def check(self) -> None:
        """Raise `EngineDiedError` if an engine process of this part exited."""
        await self.follower.check()

    async def close(self) -> None:
        """End the engine processes of this part."""
        await self.follower.stop()


def completion_problem(completion: object, request: GenerateRequest, *, vocab_size: int | None) -> str:
    """Problem with an engine's completion of `request`, partial or not; empty if it is valid.

    `vocab_size` is the model's, which may exceed the tokenizer's; None if unknown.
    """
    if not isinstance(completion, Completion):
        return f"it is {_shown(completion)}, expected a Completion"
    if completion.id != request.id:
        return f"its id is {completion.id!r}"
    outputs: object = completion.outputs
    if not isinstance(outputs, tuple) or not all(isinstance(output, CompletionOutput) for output in outputs):
        return f"outputs is {_shown(outputs)}, expected a tuple of CompletionOutput"
    if len(completion.outputs) != request.n:
        return f"{len(completion.outputs)} outputs, expected n = {request.n}"
    if request.prompt_logprobs and completion.prompt_logprobs is not None:
        problem = _array_problem(completion.prompt_logprobs, np.float32, len(request.prompt_ids), finite=True)
        if problem:
            return f"prompt_logprobs {problem}"
    if request.prompt_topk and completion.prompt_topk is not None:
        shape, topk = (len(request.prompt_ids), request.prompt_topk), completion.prompt_topk
        for name, array in (("ids", topk.ids), ("logprobs", topk.logprobs)):
            if not isinstance(array, np.ndarray) or array.shape != shape or not np.isfinite(array).all():
                return f"prompt_topk.{name} is {_shown(array)}, expected finite values of shape {shape}"
    for index, output in enumerate(completion.outputs):
        if problem := _output_problem(output, request, vocab_size):
            return f"output {index}: {problem}"
    return ""


def _output_problem(output: CompletionOutput, request: GenerateRequest, vocab_size: int | None) -> str:
    if problem := _array_problem(output.token_ids, np.int64):
        return f"token_ids {problem}"
    ids, most = output.token_ids, request.params.max_new_tokens
    if len(ids) > most:
        return f"{len(ids)} tokens, more than max_new_tokens = {most}"
    if len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        known = "at least 0" if vocab_size is None else f"below the model's vocabulary of {vocab_size}"
        return f"token_ids range from {ids.min()} to {ids.max()}, expected ids {known}"
    if problem := _array_problem(output.logprobs, np.float32, len(ids), finite=True):
        return f"logprobs {problem}"
    if problem := _array_problem(output.versions, np.int32, len(ids)):
        return f"versions {problem}"
    if output.finish_reason not in get_args(FinishReason):
        return f"finish_reason is {output.finish_reason!r}, expected {', '.join(get_args(FinishReason))}"
    routed: object = output.routed_experts
    if routed is None:
        return ""
    if not isinstance(routed, np.ndarray) or routed.dtype.kind != "u" or routed.ndim != 3:
        return f"routed_experts is {_shown(routed)}, expected unsigned integers [tokens, layers, experts]"
    if len(routed) > (most_rows := max(0, len(request.prompt_ids) + len(ids) - 1)):
        return f"routed_experts has {len(routed)} rows, expected at most {most_rows}"
    return ""


def _array_problem(array: object, dtype: type[np.generic], length: int | None = None, *, finite: bool = False) -> str:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        return f"is {_shown(array)}, expected a one-dimensional array of {np.dtype(dtype)}"
    if length is not None and len(array) != length:
        return f"has {len(array)} values for {length} tokens"
    if finite and not np.isfinite(array).all():
        position = int(np.flatnonzero(~np.isfinite(array))[0])
        return f"is {array[position]} at token {position}, expected finite values"
    return ""


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
