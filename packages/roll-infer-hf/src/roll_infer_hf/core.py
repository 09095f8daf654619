"""Inner loop of the engine: synchronous, single-threaded, independent of asyncio.

submit ─► scheduler ─► prefill ─┐
                                ├─► sample ─► record ─► ended? ─► drop rows
          running rows ─► decode┘

On a device a step's tokens are recorded after the next step has been launched, which takes them from the device. A row
that has ended is then computed once more; its extra token is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import DataError, NonFiniteError
from roll_core.types import Completion
from roll_infer_hf.batch import Batch
from roll_infer_hf.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from roll_infer_hf.config import HFInferConfig
    from roll_infer_hf.runner import CachedPrompt, PromptChunk, Runner
    from roll_infer_hf.sequence import RunningRequest, Sequence


COUNTED = (
    "prompt_tokens",
    "shared_prompt_tokens",
    "generated_tokens",
    "decode_steps",
    "prefill_seconds",
    "decode_seconds",
    "running/max",
    "waiting/max",
)


class EngineCore:
    """Owns requests from submission to completion; schedules, prefills, decodes and samples."""

    def __init__(self, runner: Runner, config: HFInferConfig) -> None:
        self.runner = runner
        self._scheduler = Scheduler(
            runner, token_budget=config.max_num_batched_tokens, min_shared_prefix=config.min_shared_prefix
        )
        self._batch = Batch(runner.vocab_size, runner.device, never=runner.media_token_ids)
        self.max_unread = 0 if runner.device.type == "cpu" else 1
        """Number of steps that may be unread, so that the device computes while the host records the step before."""
        self._recompute = config.kv_after_update == "recompute"
        self._unfinished: dict[str, RunningRequest] = {}
        self._some_ended = False
        self.version = 0
        self._counters: dict[str, float] = defaultdict(float)
        self._counters_lock = threading.Lock()
        """`take_metrics` is called on the event loop while a step adds to the counters on the worker thread."""

    @property
    def busy(self) -> bool:
        """True if a sequence is waiting, being prefilled or running."""
        return self._scheduler.busy or len(self._batch) > 0 or self._some_ended

    def submit(self, request: RunningRequest) -> None:
        """Add the request's sequences to the waiting queue. The caller guarantees that the id is not in use.

        A request whose images do not fit its prompt fails in the next step.
        """
        self._unfinished[request.request.id] = request
        try:
            self.runner.check_media(request.request)
        except DataError as error:
            self._fail([request], error)
        else:
            self._scheduler.add(request.sequences)

    def step(self) -> list[RunningRequest]:
        """Prefill prompts within the token budget, then decode one token per running row.

        Returns the requests that are done.
        """
        started = time.perf_counter()
        self._count_max("waiting/max", len(self._scheduler.waiting))
        if self._scheduler.waiting:
            self._scheduler.enter(len(self._batch), self._batch.longest(), self._batch.tokens)
        chunks = self._scheduler.chunks()
        if chunks:
            self._prefill(chunks)
            self._count("prefill_seconds", time.perf_counter() - started)
        started = time.perf_counter()
        if len(self._batch):
            num = len(self._batch)
            if self._batch.can_continue:
                logits = self.runner.decode(self._batch.last_tokens)
                self._batch.sample(logits, 0, self.version, self.runner.routed_experts_NMK)
                self._count("decode_steps", 1)
                self._count("decode_rows", num)
                self._count_max("running/max", num)
                self._record(self.max_unread)
            else:
                self._record(0)
            self._count("decode_seconds", time.perf_counter() - started)
        return self._take_done()

    def abort(self, ids: Iterable[str]) -> list[RunningRequest]:
        """End requests with their partial outputs. Unknown ids are ignored."""
        chosen = {id(self._unfinished[request_id]) for request_id in ids if request_id in self._unfinished}
        self._scheduler.remove(lambda sequence: id(sequence.request) in chosen)
        remaining_N = np.array([id(row.request) not in chosen for row in self._batch.rows], dtype=np.bool_)
        for request in self._unfinished.values():
            if id(request) in chosen:
                for sequence in request.sequences:
                    if sequence.output is None:
                        self._batch.finish(sequence, "abort")
                self._some_ended = True
        self._drop(remaining_N)
        self._scheduler.release()
        return self._take_done()

    def progress(self) -> list[Completion]:
        """Partial outputs of unfinished requests."""
        return [
            Completion(
                id=request.request.id,
                outputs=tuple(
                    sequence.output or self._batch.output_of(sequence, "abort") for sequence in request.sequences
                ),
            )
            for request in self._unfinished.values()
            if request.error is None
        ]

    def fail_all(self, error: Exception) -> list[RunningRequest]:
        """Fail every request with `error` and drop all rows, also those that a failed step left only in the runner."""
        self._fail(list(self._unfinished.values()), error)
        self._batch.reorder(self.runner.drop(np.zeros(len(self._batch), dtype=np.bool_)))
        return self._take_done()

    def weights_changed(self, version: int) -> None:
        """Continue with new weights of `version`.

        Prompts whose rows have not joined the batch are prefilled again. Running rows keep their keys and values; with
        `kv_after_update: recompute` they return to the queue and are prefilled again.
        """
        self.version = version
        self._scheduler.recall()
        self._scheduler.release()
        if self._recompute:
            recalled = self._batch.rows
            self._drop(np.zeros(len(recalled), dtype=np.bool_))
            self._scheduler.add(recalled)
        self.runner.refresh()

    def release(self) -> None:
        """Release KV caches and copies of weights until the weights change. No request may be running."""
        self._scheduler.release()
        self.runner.release()

    def take_metrics(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""
        with self._counters_lock:
            counters, self._counters = self._counters, defaultdict(float)
        metrics = {name: counters[name] for name in COUNTED}
        metrics["running/mean"] = counters["decode_rows"] / max(counters["decode_steps"], 1)
        return metrics

    # -- inside --------------------------------------------------------------------------------------------------------

    def _count(self, name: str, value: float) -> None:
        with self._counters_lock:
            self._counters[name] += value

    def _count_max(self, name: str, value: int) -> None:
        with self._counters_lock:
            self._counters[name] = max(self._counters[name], value)

    def _prefill(self, chunks: list[PromptChunk]) -> None:
        logits = self.runner.prefill(chunks)
        self._count("prompt_tokens", sum(chunk.end - chunk.begin for chunk in chunks))
        complete = self._scheduler.ready(chunks)
        sequences: list[Sequence] = []
        prompts: list[CachedPrompt] = []
        sources: list[int] = []
        for source, (prompt, group) in enumerate(complete):
            for sequence in group:
                request = sequence.request
                if request.request.prompt_logprobs and request.prompt_logprobs is None:
                    request.take_logprobs(prompt)
                sequence.add_experts(prompt.routed_experts)
                if sequence.params.max_new_tokens == 0:
                    self._batch.finish(sequence, "length")
                    self._some_ended = True
                    continue
                sequences.append(sequence)
                prompts.append(prompt)
                sources.append(source)
        shared = sum(len(prompt) * (len(group) - 1) + prompt.donated for prompt, group in complete)
        self._count("shared_prompt_tokens", shared)
        try:
            if sequences:
                first = len(self._batch)
                self.runner.join(prompts)
                self._batch.join(sequences)
                self._batch.sample(logits[sources], first, self.version)
                self._record(self.max_unread)
        finally:  # after a failed step no sequence needs these prompts, either
            self._scheduler.release([prompt for prompt, _ in complete])

    def _record(self, max_unread: int) -> None:
        """Record sampled tokens until at most `max_unread` steps are unread, and drop the rows that end."""
        while self._batch.num_unread > max_unread:
            step, remaining_N, broken = self._batch.record()
            self._count("generated_tokens", len(step.rows_N))
            if len(broken):
                self.runner.scrub(broken)
                requests = {id(self._batch.rows[row].request): self._batch.rows[row].request for row in broken}
                for request in requests.values():
                    error = NonFiniteError(
                        f"request {request.request.id!r}: the model's logits are not finite"
                        f" (weight version {step.version}); check the weights and the dtype"
                    )
                    self._fail([request], error)
                remaining_N &= np.array([row.request.error is None for row in self._batch.rows], dtype=np.bool_)
            self._drop(remaining_N)

    def _fail(self, requests: list[RunningRequest], error: Exception) -> None:
        failed = {id(request) for request in requests}
        self._scheduler.remove(lambda sequence: id(sequence.request) in failed)
        self._some_ended = True
        for request in requests:
            request.error = error
            for sequence in request.sequences:
                self._batch.free(sequence)

    def _drop(self, kept_N: npt.NDArray[np.bool_]) -> None:
        if not kept_N.all():
            self._some_ended = True
            self._batch.reorder(self.runner.drop(kept_N))

    def _take_done(self) -> list[RunningRequest]:
        if not self._some_ended:
            return []
        self._some_ended = False
        done = [request for request in self._unfinished.values() if request.done]
        for request in done:
            del self._unfinished[request.request.id]
        return done
