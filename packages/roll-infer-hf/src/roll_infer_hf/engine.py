"""The embedded infer strategy: a continuous-batching engine on a thread of its own, behind asyncio.

    event loop                                   worker thread (one)
    ----------                                   -------------------
    generate() ── command ──► inbox ──────────►  carry out commands, then step until a request is done
    abort()                     ▲                or the inbox is no longer empty
    update_weights()            └── futures ◄──  results

All requests that enter in one turn of the event loop are in the inbox before the thread looks, so equal sets of
requests are batched alike every time. The thread touches the model and the core; the event loop touches the inbox and
the futures; nothing is locked because only one of them runs with either.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from roll_core import openmp
from roll_core.errors import DataError, ModelError, UnsupportedError
from roll_core.spec.infer import InferStrategy
from roll_core.spec.providers import InferCapabilities
from roll_core.spec.requests import check_request
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.thread import EngineThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.infer import MetricKind
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, WeightManifest, WeightReceipt
    from roll_infer_hf.core import EngineCore
    from roll_infer_hf.held_adapter import HeldAdapter
    from roll_infer_hf.held_weights import HeldWeights
    from roll_infer_hf.runner import Runner
    from roll_infer_hf.sequence import RunningRequest
    from roll_infer_hf.stopping import StopStrings

log = logging.getLogger(__name__)

NOT_RUNNING = "the engine does not run: start it first, and not after stop"
Command = tuple["Callable[[], Any]", "asyncio.Future[Any] | None"]
"""What the thread shall do between two steps, and who waits for its result."""


class HFInferStrategy(InferStrategy):
    """Generates with a Hugging Face model in this process. Role `generate` of `hf_infer`."""

    def __init__(self, config: StrategyConfig) -> None:
        super().__init__(config)
        if not isinstance(config, HFInferConfig):
            raise TypeError(f"the embedded engine takes an HFInferConfig, not a {type(config).__name__}")
        self._settings: HFInferConfig = config
        self._core: EngineCore | None = None
        self._weights: HeldWeights | HeldAdapter | None = None
        self._thread: EngineThread | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._inbox: deque[Command] = deque()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._arrivals = itertools.count()
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}

    metric_kinds: ClassVar[Mapping[str, MetricKind]] = MappingProxyType(
        {"running/mean": "mean", "running/max": "max", "waiting/max": "max"}
    )
    capabilities = InferCapabilities(
        sleeps=True,
        lora=True,
        prompt_logprobs=True,
        routed_experts=True,
        free_seeds=True,
        in_flight_update=True,
        device_weights=True,
        weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
    )

    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load or make the model, on the thread that will run it."""
        if self._task is not None:
            raise RuntimeError("the engine was started twice")
        self._spec, self._mesh = model, mesh
        self._thread = EngineThread("roll-engine")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        self._task = asyncio.create_task(self._run(), name="roll-engine")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Queue the request. Raises `DataError` for prompts and parameters that cannot be served, `NonFiniteError`."""
        running = self._admit(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._tell(functools.partial(self._ready_core.submit, running), None)
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.get(request.id) is future:
                del self._waiting[request.id]
            if self._task is not None:
                self._tell(functools.partial(self._forget, request.id), None)
            raise

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Between two steps; waits for the step that runs."""
        chosen = [each for each in ids if each in self._waiting]
        done: list[RunningRequest] = await self._ask(functools.partial(self._ready_core.abort, chosen))
        self._resolve(done)
        return [each.completion() for each in done if each.error is None]

    async def progress(self) -> list[Completion]:
        """Between two steps."""
        found: list[Completion] = await self._ask(self._ready_core.progress)
        return found

    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Between two steps of running requests, which go on under the new weights. After an update that broke off they
        wait where they are, and new ones beside them, for one that does not."""
        receipt: WeightReceipt = await self._ask(
            functools.partial(self._update, version, manifest, tensors, shared=shared)
        )
        return receipt

    async def sleep(self) -> None:
        """Between two steps. Keys and values, weights and what was made of them go (of an engine that serves adapters,
        all but the weights beneath); waking takes no memory, but what is then published, and requests, do."""
        await self._ask(self._release)

    def metrics(self) -> Mapping[str, float]:
        """Tokens, steps and seconds, and how full the batch was."""
        return self._ready_core.take_metrics()

    async def stop(self) -> None:
        """Cancel what waits, end the thread, drop the model."""
        task, self._task = self._task, None
        if task is not None:
            self._closing = True
            self._wake.set()
            await task
        for future in self._waiting.values():
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
        """Whether there is anything to compute, and weights to compute it with."""
        return self._ready_core.busy and not (self._weights is not None and self._weights.torn)

    def _tell(self, act: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        self._inbox.append((act, future))
        self._wake.set()

    async def _ask(self, act: Callable[[], Any]) -> Any:
        if self._task is None:  # nobody would answer
            raise RuntimeError(NOT_RUNNING)
        future = asyncio.get_running_loop().create_future()
        self._tell(act, future)
        return await future

    async def _run(self) -> None:
        """Owns the thread: hands it commands, brings back what is done."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            # Whoever was woken by the last results, or by the same event as the first request, enters before we look.
            for _ in range(3):
                await asyncio.sleep(0)
            commands = [self._inbox.popleft() for _ in range(len(self._inbox))]
            done, answers = await loop.run_in_executor(self._thread, self._work, commands)
            for waiter, result, error in answers:
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
            future = self._waiting.pop(request.request.id, None)
            if future is None or future.done():
                continue
            if request.error is not None:
                future.set_exception(request.error)
            else:
                future.set_result(request.completion())

    # -- worker thread -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        import torch

        from roll_infer_hf import compiled_decoder, decoder
        from roll_infer_hf.core import EngineCore
        from roll_infer_hf.held_adapter import HeldAdapter
        from roll_infer_hf.held_weights import HeldWeights
        from roll_infer_hf.module_runner import ModuleRunner
        from roll_modeling.layout import make_adjacent
        from roll_modeling.model import end_token_ids, load_model

        if self._mesh.num_threads:
            torch.set_num_threads(self._mesh.num_threads)
        model = load_model(self._spec, device=self._mesh.device)
        model.requires_grad_(False)
        make_adjacent(model)
        room: dict[str, int] = {
            "cache_bytes": int(self._settings.kv_cache_gib * 2**30),
            "max_rows": self._settings.max_num_seqs,
        }
        reason = decoder.unsupported(model)
        if reason is None and self._spec.router_replay:
            raise UnsupportedError(f"router_replay needs experts, and a {model.config.model_type} has none")
        runner: Runner
        if reason is None:
            chosen = compiled_decoder.decoder_class(model, self._settings.kernels)
            runner = chosen(model, pack=self._settings.pack_weights, **room)
        else:
            log.info("the embedded engine runs this model through transformers' own code, more slowly: %s", reason)
            runner = ModuleRunner(model, record_experts=self._spec.router_replay, **room)
        self._model = model
        who: dict[str, Any] = {"role": self._mesh.role, "rank": self._mesh.rank}
        lora = self._spec.lora
        self._weights = HeldWeights(model, **who) if lora is None else HeldAdapter(model, lora, **who)
        self._eos_ids = end_token_ids(model.config, getattr(model, "generation_config", None), runner.vocab_size)
        self._core = EngineCore(runner, self._settings)

    def _work(
        self, commands: Sequence[Command]
    ) -> tuple[list[RunningRequest], list[tuple[asyncio.Future[Any], Any, BaseException | None]]]:
        """Carry out commands, then step until somebody has to be told something."""
        answers: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        core = self._ready_core
        for act, future in commands:
            try:
                result, error = act(), None
            except Exception as caught:  # the caller's to handle; the engine goes on
                if future is None:
                    return core.fail_all(caught), answers
                result, error = None, caught
            if future is not None:
                answers.append((future, result, error))
        done: list[RunningRequest] = []
        try:
            while self._can_step and not done and not answers and not self._inbox and not self._closing:
                done = core.step()
        except Exception as caught:  # a model that fails in the middle of a step fails everything that runs on it
            log.exception("the engine's step failed")
            done = core.fail_all(caught)
        if not self._can_step:
            openmp.rest()
        return done, answers

    def _forget(self, request_id: str) -> None:
        self._ready_core.abort([request_id])

    def _update(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool
    ) -> WeightReceipt:
        if self._weights is None:
            raise RuntimeError("the engine does not run")
        core = self._ready_core
        receipt = self._weights.update(version, core.version, manifest, tensors, shared=shared)
        core.weights_changed(version)
        self._weights.torn = False
        return receipt

    def _release(self) -> None:
        core = self._ready_core
        if core.busy:
            raise RuntimeError("the engine is to sleep while requests run: abort them first")
        if self._weights is not None and not self._weights.released:
            core.release()
            self._weights.release()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, request: GenerateRequest) -> RunningRequest:
        """Check what can be checked before the request waits."""
        from roll_infer_hf.sequence import RunningRequest

        runner = self._ready_core.runner
        if self._weights is None or self._weights.released:
            raise RuntimeError("the engine has no weights since it slept: update them before it generates")
        params, name = request.params, f"request {request.id!r}"
        if request.id in self._waiting:
            raise DataError(f"{name}: a request of this id is still running; ids are unique")
        limit = f"the model's {runner.max_positions} positions"
        check_request(
            request,
            vocab_size=runner.vocab_size,
            max_tokens=runner.max_positions,
            limit=limit,
            routed_experts=self._spec.router_replay,
        )
        total = len(request.prompt_ids) + params.max_new_tokens
        if not runner.fits(1, total):
            raise ModelError(
                f"{name}: keys and values of {total} tokens do not fit kv_cache_gib {self._settings.kv_cache_gib:g};"
                " raise it in the role's strategy_config"
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
        from roll_infer_hf.stopping import StopStrings
        from roll_modeling.model import load_tokenizer

        if not all(strings):
            raise DataError("stop strings: an empty string would end every response at once")
        if strings not in self._stop_strings:
            if not (self._spec.tokenizer or self._spec.path):
                raise UnsupportedError(
                    "stop strings need a tokenizer, and this role's model has none; stop_token_ids work without"
                )
            self._stop_strings[strings] = StopStrings(load_tokenizer(self._spec), strings)
        return self._stop_strings[strings]
