"""Inference engine `acme`: `model.generate` of transformers.

generate() -> thread: the n outputs as one batch -> SeededSampling, StopWhenAborted for each token -> Completion

Each request has a thread of its own while it is computed. Requests share nothing but the parameters, which change only
while no request runs (the engine does not declare `in_flight_update`).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from roll_core.errors import (
    CorruptTensorError,
    EngineDiedError,
    MissingTensorError,
    UnexpectedTensorError,
    UnsupportedError,
)
from roll_core.spec.infer import InferStrategy, check_request
from roll_core.spec.weights import make_receipt
from roll_core.types import Completion, CompletionOutput
from roll_modeling.model import end_token_ids, load_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import GenerateRequest, SamplingParams, WeightManifest, WeightReceipt
    from roll_infer_acme.config import AcmeEngineConfig


@dataclass(eq=False)
class Running:
    """A request that waits or generates."""

    request: GenerateRequest
    arrival: int
    aborted: bool = False
    outputs: list[CompletionOutput] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def completion(self) -> Completion:
        """The outputs, which are empty if the request did not start."""
        reason = "abort" if self.request.params.max_new_tokens else "length"
        empty = [_output([], [], 0, reason)] * self.request.n
        return Completion(id=self.request.id, outputs=tuple(self.outputs or empty))


class AcmeEngine(InferStrategy):
    """One replica: a model and the threads that compute it."""

    config: AcmeEngineConfig
    model: Any  # a PreTrainedModel; types of torch.nn.Module do not know its methods
    threads: ThreadPoolExecutor | None = None

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model. Raises `ModelError`."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self.model = load_model(model, device=mesh.device).requires_grad_(False)
        text = self.model.config.get_text_config()
        self.vocab_size, self.max_tokens = int(text.vocab_size), int(text.max_position_embeddings)
        self.end_ids = end_token_ids(self.model.config, self.model.generation_config, self.vocab_size)
        self.model.generation_config = GenerationConfig()  # requests alone set sampling parameters
        self.seed, self.arrivals, self.version, self.num_generated = mesh.sampling_seed, itertools.count(), 0, 0
        self.running: dict[str, Running] = {}
        self.threads, self.lock = ThreadPoolExecutor(self.config.max_requests, "acme-engine"), threading.Lock()

    async def stop(self) -> None:
        """Stop running requests and release the model."""
        threads, self.threads = self.threads, None
        if threads is not None:
            for request in self.running.values():
                request.aborted = True
            await asyncio.to_thread(threads.shutdown)
            del self.model

    def metrics(self) -> Mapping[str, float]:
        """Tokens generated since the last call."""
        with self.lock:
            num_tokens, self.num_generated = self.num_generated, 0
        return {"generated_tokens": float(num_tokens)}

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate `n` outputs. Raises `DataError` or `UnsupportedError` for a request that cannot be computed."""
        threads = self._alive()
        self._check(request)
        running = self.running[request.id] = Running(request, next(self.arrivals))
        try:
            await asyncio.get_running_loop().run_in_executor(threads, self._compute, running)
        finally:  # also if this call is cancelled: the thread then stops after the next token
            running.aborted = True
            running.done.set()
            self.running.pop(request.id, None)
        return running.completion()

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Stop requests after the token that they compute, or after their first."""
        requests = [self.running[request_id] for request_id in ids if request_id in self.running]
        for request in requests:
            request.aborted = True
        for request in requests:
            await request.done.wait()
        return [request.completion() for request in requests]

    def _alive(self) -> ThreadPoolExecutor:
        if self.threads is None:
            raise EngineDiedError("the engine is not running: call start first; after stop, start a new engine")
        return self.threads

    def _check(self, request: GenerateRequest) -> None:
        limit = f"the model's {self.max_tokens} positions"
        check_request(request, vocab_size=self.vocab_size, max_tokens=self.max_tokens, limit=limit)
        if request.params.stop and not request.params.ignore_eos:
            raise UnsupportedError(f"request {request.id!r}: stop is set; this engine supports only stop_token_ids")
        for name in ("prompt_logprobs", "prompt_topk"):
            if getattr(request, name):
                raise UnsupportedError(f"request {request.id!r}: {name} is set; this engine does not compute it")

    # -- on a thread ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _compute(self, running: Running) -> None:
        """Generate all outputs of a request as one batch: their prompt is the same, so nothing is padded."""
        request, params = running.request, running.request.params
        if self.threads is None or not params.max_new_tokens:
            return
        device, num_prompt = self.model.device, len(request.prompt_ids)
        prompt_NP = torch.from_numpy(np.asarray(request.prompt_ids, dtype=np.int64)).to(device).expand(request.n, -1)
        ends = () if params.ignore_eos else (*self.end_ids, *params.stop_token_ids)
        sampling = [SeededSampling(params, self._seeds(running))] if params.temperature else []
        generated = self.model.generate(
            prompt_NP,
            attention_mask=torch.ones_like(prompt_NP),
            generation_config=self._settings(params, ends),
            logits_processor=LogitsProcessorList(sampling),
            stopping_criteria=StoppingCriteriaList([StopWhenAborted(self, running)]),
        )
        for row, tokens_R in enumerate(generated.sequences[:, num_prompt:]):
            tokens = tokens_R.tolist()
            length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
            logits_RV = torch.stack([logits[row] for logits in generated.logits[:length]]).float()
            logprobs_RV = (logits_RV / (params.temperature or 1.0)).log_softmax(-1)
            logprobs_R = logprobs_RV.gather(1, tokens_R[:length, None])[:, 0].cpu()
            last = tokens[length - 1]
            if last in ends:
                output = _output(tokens[:length], logprobs_R, self.version, "stop", last)
            else:
                cut = running.aborted and length < params.max_new_tokens
                output = _output(tokens, logprobs_R, self.version, "abort" if cut else "length")
            running.outputs.append(output)

    def _settings(self, params: SamplingParams, ends: Sequence[int]) -> GenerationConfig:
        """Settings of transformers. Tokens are those with the highest score, to which `SeededSampling` adds noise."""
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens if ends and params.min_new_tokens else None,
            eos_token_id=list(ends) or None,
            pad_token_id=0,  # fills rows that ended before others
            repetition_penalty=params.repetition_penalty,
            output_logits=True,
            return_dict_in_generate=True,
        )

    def _seeds(self, running: Running) -> list[int]:
        """A seed for each output. Output `i` does not depend on `n`."""
        seed = running.request.params.seed
        key = (0, seed) if seed is not None else (1, self.seed, running.arrival)
        rows = range(running.request.n)
        return [int(np.random.SeedSequence((*key, row)).generate_state(1, np.uint64)[0] >> 1) for row in rows]

    # -- weights -------------------------------------------------------------------------------------------------------

    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        """Replace the parameters. Raises `WeightSyncError` for tensors that are not those of the model."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._alive(), self._update, version, manifest, tensors, shared)

    def _update(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], shared: bool
    ) -> WeightReceipt:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        received: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in parameters:
                raise UnexpectedTensorError(f"{name} was received; the model has no such parameter")
            parameter = parameters[name]
            if tensor.shape != parameter.shape:
                raise CorruptTensorError(
                    f"{name} was received as {tuple(tensor.shape)}, expected {tuple(parameter.shape)}"
                )
            parameter.data = tensor.detach().to(parameter.device, parameter.dtype, copy=not shared)
            received[name] = parameter
        loaded = {id(parameter) for parameter in received.values()}
        if missing := [name for name, parameter in parameters.items() if id(parameter) not in loaded]:
            raise MissingTensorError(f"{missing[0]} was not received, and {len(missing) - 1} others")
        self.version = version
        return make_receipt(manifest, ((name, parameter.detach()) for name, parameter in received.items()))


class SeededSampling(LogitsProcessor):
    """Temperature, top-k, top-p and min-p of transformers, then Gumbel noise from a generator for each output.

    The argmax of logits + noise is a sample of softmax(logits) (the Gumbel-max trick), so an output depends on its own
    seed only.
    """

    def __init__(self, params: SamplingParams, seeds: Sequence[int]) -> None:
        self.warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(params.temperature))]
        self.warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        self.warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        self.warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[N, V]` of the next token of each output."""
        scores_NV = scores.float()
        for warp in self.warpers:
            scores_NV = warp(input_ids, scores_NV)
        size = scores_NV.shape[1]
        uniform_NV = torch.stack(
            [torch.rand(size, generator=generator, dtype=torch.float64) for generator in self.generators]
        )
        return scores_NV - uniform_NV.log().neg().log().to(scores_NV)


class StopWhenAborted(StoppingCriteria):
    """Counts tokens, and stops `generate` after the next one if the request was aborted."""

    def __init__(self, engine: AcmeEngine, running: Running) -> None:
        self.engine, self.running = engine, running

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        """True for each row that ends here."""
        with self.engine.lock:
            self.engine.num_generated += len(input_ids)
        return torch.full((len(input_ids),), self.running.aborted, device=input_ids.device)


def _output(
    tokens: Sequence[int], logprobs: Any, version: int, reason: Any, stop: int | None = None
) -> CompletionOutput:
    return CompletionOutput(
        token_ids=np.array(tokens, dtype=np.int64),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.full(len(tokens), version, dtype=np.int32),
        finish_reason=reason,
        stop=stop,
    )
