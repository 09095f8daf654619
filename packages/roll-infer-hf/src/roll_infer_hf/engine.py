"""Embedded infer strategy `hf_infer`: a continuous-batching engine on its own thread, with an asyncio interface.

    event loop                                   worker thread (one)
    ----------                                   -------------------
    generate() ── command ──► inbox ──────────►  run commands, then steps until a request is done
    abort()                     ▲                or the inbox is no longer empty
    update_weights()            └── futures ◄──  results

All requests submitted in one iteration of the event loop are in the inbox before its commands go to the thread. So
equal sets of requests are always batched the same way. The thread runs the model and the core; the event loop manages
the inbox and the futures. The thread only tests if the inbox is empty. The counters of `metrics` have a lock.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections import deque
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from roll_core import openmp
from roll_core.errors import DataError, ModelError, UnsupportedError
from roll_core.spec.infer import InferStrategy, check_request
from roll_infer_hf.config import HFInferConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.infer import MetricKind
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, Media, TokenIds, WeightManifest, WeightReceipt
    from roll_infer_hf.core import EngineCore
    from roll_infer_hf.loaded_weights import Replaceable
    from roll_infer_hf.runner import Runner
    from roll_infer_hf.sequence import RunningRequest, StopStrings

log = logging.getLogger(__name__)

NOT_RUNNING = "the engine is not running: call `start` first, and do not use it after `stop`"
Command = tuple["Callable[[], Any]", "asyncio.Future[Any] | None"]
"""Function that the worker thread runs between two steps, and the future of its result (None: no result needed)."""


class HFInferStrategy(InferStrategy):
    """Infer strategy `hf_infer`: generates with a Hugging Face model in this process."""

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, HFInferConfig):
            raise TypeError(f"expected HFInferConfig, got {type(config).__name__}")
        self._settings: HFInferConfig = config
        self._core: EngineCore | None = None
        self._weights: Replaceable | None = None
        self._thread: EngineThread | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._inbox: deque[Command] = deque()
        self._waiting: dict[str, tuple[RunningRequest, asyncio.Future[Completion]]] = {}
        """Requests whose callers wait, and the futures of their completions, by id."""
        self._arrivals = itertools.count()
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}

    metric_kinds: ClassVar[Mapping[str, MetricKind]] = MappingProxyType(
        {"running/mean": "mean", "running/max": "max", "waiting/max": "max"}
    )

    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load or initialize the model on the thread that will run it.

        Raises `ModelError`, `UnsupportedError`, and `ExtensionError` if `kernels: compiled` cannot be compiled.
        """
        if self._task is not None:
            raise RuntimeError("the engine was started twice")
        self._spec, self._mesh = model, mesh
        self._thread = EngineThread("roll-engine")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        self._task = asyncio.create_task(self._run(), name="roll-engine")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Queue the request and return its completion.

        Raises `DataError` for invalid prompts, images or parameters, and `ModelError` if the request does not fit the
        KV cache. Raises `UnsupportedError` for stop strings without a tokenizer and for images of a model of text, and
        `NonFiniteError` if logits are not finite.
        """
        running = self._admit(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = running, future
        self._post(functools.partial(self._ready_core.submit, running), None)
        try:
            return await future
        except asyncio.CancelledError:
            self._take_waiting(running)
            if self._task is not None:
                self._post(functools.partial(self._forget, request.id), None)
            raise

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Abort the requests between two steps, after the current step. Returns their partial outputs."""
        chosen = [request_id for request_id in ids if request_id in self._waiting]
        done: list[RunningRequest] = await self._call(functools.partial(self._ready_core.abort, chosen))
        self._resolve(done)
        return [request.completion() for request in done if request.error is None]

    async def progress(self) -> list[Completion]:
        """Partial outputs of the unfinished requests, taken between two steps."""
        completions: list[Completion] = await self._call(self._ready_core.progress)
        return completions

    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Replace the weights between two steps; running requests continue with the new weights.

        If an update fails after it has started, running and new requests wait until an update succeeds.
        """
        receipt: WeightReceipt = await self._call(
            functools.partial(self._update, version, manifest, tensors, shared=shared)
        )
        return receipt

    async def activations(self, tokens: TokenIds, media: tuple[Media, ...] = ()) -> Mapping[str, Tensor]:
        """Activations of a prefill between two steps. No request may be running."""
        activations: Mapping[str, Tensor] = await self._call(
            functools.partial(self._ready_core.runner.activations, np.asarray(tokens, dtype=np.int64), media)
        )
        return activations

    async def loaded_weights(self) -> Mapping[str, Tensor]:
        """Copies of the model's parameters, between two steps."""
        weights: Mapping[str, Tensor] = await self._call(
            lambda: {name: parameter.detach().cpu().clone() for name, parameter in self._model.named_parameters()}
        )
        return weights

    async def sleep(self) -> None:
        """Release the KV cache, the weights and all copies made of them, between two steps.

        Other processes can allocate the released memory of a device.
        With adapters the base weights stay loaded. Waking allocates nothing; the next weight update and requests do.
        Raises `RuntimeError` if requests are running.
        """
        await self._call(self._release)

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call: tokens, steps, seconds, and numbers of running and waiting sequences."""
        return self._ready_core.take_metrics()

    async def stop(self) -> None:
        """Cancel all requests, end the thread and release the model."""
        task, self._task = self._task, None
        if task is not None:  # before the thread: a step in progress still runs on it
            self._closing = True
            self._wake.set()
            await task
        for _, future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.shutdown)
        self._core = self._weights = None

    # -- event loop ----------------------------------------------------------------------------------------------------

    _closing = False

    @property
    def _ready_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError(NOT_RUNNING)
        return self._core

    @property
    def _can_step(self) -> bool:
        """True if there is work to do and no weight update is incomplete."""
        return self._ready_core.busy and not (self._weights is not None and self._weights.incomplete)

    def _post(self, act: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        self._inbox.append((act, future))
        self._wake.set()

    async def _call(self, act: Callable[[], Any]) -> Any:
        if self._task is None:  # no task would ever resolve the future
            raise RuntimeError(NOT_RUNNING)
        future = asyncio.get_running_loop().create_future()
        self._post(act, future)
        return await future

    async def _run(self) -> None:
        """Main loop: run commands and steps on the worker thread, and resolve the futures of their results."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            # Callers woken by the last results, or by the same event as the first request, submit before we read.
            for _ in range(3):
                await asyncio.sleep(0)
            commands = [self._inbox.popleft() for _ in range(len(self._inbox))]
            done, results = await loop.run_in_executor(self._thread, self._work, commands)
            for waiter, result, error in results:
                if waiter.cancelled():
                    continue
                if error is not None:
                    waiter.set_exception(error)
                else:
                    waiter.set_result(result)
            self._resolve(done)
            if self._can_step or self._inbox:
                self._wake.set()
        for _, future in self._inbox:
            if future is not None:
                future.cancel()
        self._inbox.clear()

    def _resolve(self, done: Iterable[RunningRequest]) -> None:
        for request in done:
            future = self._take_waiting(request)
            if future is None or future.done():
                continue
            if request.error is not None:
                future.set_exception(request.error)
            else:
                future.set_result(request.completion())

    def _take_waiting(self, request: RunningRequest) -> asyncio.Future[Completion] | None:
        """Remove and return the future of a request.

        None if its caller was cancelled. The caller may since have reused the id for another request.
        """
        waiting, future = self._waiting.get(request.request.id, (None, None))
        if waiting is not request:
            return None
        del self._waiting[request.request.id]
        return future

    # -- worker thread -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        import torch

        from roll_infer_hf import compiled_decoder, decoder
        from roll_infer_hf.core import EngineCore
        from roll_infer_hf.loaded_weights import LoadedAdapter, LoadedWeights
        from roll_infer_hf.module_runner import ModuleRunner
        from roll_modeling.images import image_reader
        from roll_modeling.layout import make_adjacent
        from roll_modeling.model import end_token_ids, load_model
        from roll_modeling.process_group import select_device

        if self._mesh.num_threads:
            torch.set_num_threads(self._mesh.num_threads)
        select_device(torch.device(self._mesh.device))
        model = load_model(self._spec, device=self._mesh.device)
        model.requires_grad_(False)
        make_adjacent(model)
        room: dict[str, int] = {
            "cache_bytes": int(self._settings.kv_cache_gib * 2**30),
            "max_rows": self._settings.max_num_seqs,
        }
        reason = decoder.unsupported(model)
        if reason is None and self._spec.router_replay:
            raise UnsupportedError(f"router_replay needs a model with experts; {model.config.model_type} has none")
        runner: Runner
        if reason is None:
            chosen = compiled_decoder.decoder_class(model, self._settings.kernels)
            runner = chosen(model, pack=self._settings.pack_weights, **room)
        else:
            log.info("hf_infer runs this model with transformers' code, which is slower: %s", reason)
            images = image_reader(model, self._spec)
            runner = ModuleRunner(model, images=images, record_experts=self._spec.router_replay, **room)
        self._model = model
        who: dict[str, Any] = {"role": self._mesh.role, "rank": self._mesh.rank}
        lora = self._spec.lora
        self._weights = LoadedWeights(model, **who) if lora is None else LoadedAdapter(model, lora, **who)
        self._eos_ids = end_token_ids(model.config, getattr(model, "generation_config", None), runner.vocab_size)
        self._core = EngineCore(runner, self._settings)

    def _work(
        self, commands: Sequence[Command]
    ) -> tuple[list[RunningRequest], list[tuple[asyncio.Future[Any], Any, BaseException | None]]]:
        """Run the commands, then run steps until a request is done, the inbox has a command or the engine closes.

        If a command has a result, runs no steps, so that its caller gets the result at once.

        Returns the requests that are done, and a `(future, result, error)` for each command with a future.
        """
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        done: list[RunningRequest] = []
        core = self._ready_core
        for act, future in commands:
            try:
                result, error = act(), None
            except Exception as caught:  # passed on to the caller; the engine continues
                result, error = None, caught
                if future is None:
                    done += core.fail_all(caught)
            if future is not None:
                results.append((future, result, error))
        try:
            while self._can_step and not done and not results and not self._inbox and not self._closing:
                done = core.step()
        except Exception as caught:  # a failed step leaves caches inconsistent, so all requests fail
            log.exception("a step of hf_infer failed; all its requests fail")
            done = core.fail_all(caught)
        if not self._can_step:
            openmp.rest()
        return done, results

    def _forget(self, request_id: str) -> None:
        self._ready_core.abort([request_id])

    def _update(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool
    ) -> WeightReceipt:
        if self._weights is None:
            raise RuntimeError(NOT_RUNNING)
        core = self._ready_core
        receipt = self._weights.update(version, core.version, manifest, tensors, shared=shared)
        core.weights_changed(version)
        self._weights.incomplete = False
        return receipt

    def _release(self) -> None:
        import torch

        from roll_modeling.offload import release_cached

        core = self._ready_core
        if core.busy:
            raise RuntimeError("requests are running: abort them before `sleep`")
        if self._weights is not None and not self._weights.released:
            core.release()
            self._weights.release()
            release_cached(torch.device(self._mesh.device))

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, request: GenerateRequest) -> RunningRequest:
        """Validate the request before it is queued. Raises `DataError`, `ModelError`, `UnsupportedError`."""
        from roll_infer_hf.sequence import RunningRequest

        runner = self._ready_core.runner
        if self._weights is None or self._weights.released:
            raise RuntimeError("the engine released its weights in `sleep`: update them before it generates")
        params, name = request.params, f"request {request.id!r}"
        if request.id in self._waiting:
            raise DataError(f"{name}: a request with this id is running; ids must be unique")
        limit = f"the model's {runner.max_positions} positions"
        check_request(
            request,
            vocab_size=runner.vocab_size,
            max_tokens=runner.max_positions,
            limit=limit,
            routed_experts=self._spec.router_replay,
            has_tokenizer=bool(self._spec.tokenizer or self._spec.path),
            images=runner.reads_images,
        )
        total = len(request.prompt_ids) + params.max_new_tokens
        if not runner.fits(1, total):
            raise ModelError(
                f"{name}: the KV cache of {total} tokens exceeds kv_cache_gib {self._settings.kv_cache_gib:g}; raise"
                " it in the role's strategy_config"
            )
        arrival = next(self._arrivals)
        ends = () if params.ignore_eos else tuple(sorted({*self._eos_ids, *params.stop_token_ids}))
        stops = self._stops(params.stop) if params.stop and not params.ignore_eos else None
        seed = params.seed
        if seed is None:
            of_start = np.random.SeedSequence([self._spec.seed % 2**64, self._mesh.sampling_seed, arrival])
            seed = int(of_start.generate_state(1, np.uint64)[0])
        return RunningRequest.make(request, (request.priority, arrival), ends, stops, seed)

    def _stops(self, strings: tuple[str, ...]) -> StopStrings:
        from roll_infer_hf.sequence import StopStrings
        from roll_modeling.model import load_tokenizer

        if strings not in self._stop_strings:
            self._stop_strings[strings] = StopStrings(load_tokenizer(self._spec), strings)
        return self._stop_strings[strings]


class EngineThread(Executor):
    """Executor that runs functions one after the other on one daemon thread.

    Unlike the threads of a `ThreadPoolExecutor`, a daemon thread that hangs does not prevent the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # every error is raised to the caller
                    future.set_exception(error)
            del item, future, work
