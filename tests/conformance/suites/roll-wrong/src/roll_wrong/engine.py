"""An engine for the bigram model with all that an infer strategy may offer, done right; the wrong ones replace a piece.

Requests take turns on the event loop, a token each. A process runs beside it, as engines have them. The cache has
space for `cache_tokens` tokens if that is set.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from roll_core.errors import (
    CorruptTensorError,
    DataError,
    MissingTensorError,
    ModelError,
    UnexpectedTensorError,
    UnsupportedError,
)
from roll_core.spec.infer import InferStrategy
from roll_core.spec.weights import make_receipt
from roll_core.types import Completion, CompletionOutput, TopTokens

NAMES = ("table.weight", "bias")
END = 1
CONTEXT = 512


@dataclass(eq=False)
class Output:
    """One response under way."""

    random: np.random.Generator
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    reason: str = ""
    stop: object = None


@dataclass(eq=False)
class Running:
    """One request under way."""

    request: object
    outputs: list
    aborted: bool = False


class RightEngine(InferStrategy):
    """Logits of the next token are a row of `table.weight` and `bias`."""

    running = None
    process = None
    drawn = 0
    torn = False
    """An update has begun, and is not complete."""

    async def start(self, model, mesh):
        try:
            stored = load_file(Path(model.path) / "weights.safetensors")
        except (OSError, SafetensorError) as error:
            raise self.no_model(model.path, error) from error
        self.process = subprocess.Popen(["sleep", "600"])
        self.held = {name: self.loaded(name, stored[name].clone(), model.dtype) for name in NAMES}
        self.path = model.path
        self.factor = 1.0
        self.reserved = 0
        self.version, self.running, self.prefixes, self.arrivals = 0, {}, {}, itertools.count()

    def loaded(self, name, tensor, dtype):
        return tensor if dtype == "fp32" else tensor.bfloat16().float()

    def no_model(self, path, error):
        return ModelError(f"cannot load the model {path!r}: {error}")

    async def stop(self):
        for each in (self.running or {}).values():
            each.aborted = True
        self.running = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    # -- requests

    async def generate(self, request):
        self.ready()
        self.check(request)
        arrival = next(self.arrivals)
        running = Running(request, [Output(self.random(request, arrival, i)) for i in range(request.n)])
        self.running[request.id] = running
        tokens = request.n * (len(request.prompt_ids) + request.params.max_new_tokens)
        held = 0
        try:
            await self.room(running, tokens)
            held = tokens
            self.reserved += held
            for step in range(self.most_tokens(request.params)):
                await asyncio.sleep(0)
                self.alive()
                while self.waits() and not running.aborted:
                    await asyncio.sleep(0)
                    self.alive()
                for output in running.outputs:
                    if not (running.aborted or output.reason):
                        row_V = self.row(output.tokens[-1]) if step else self.after_prompt(request)
                        self.advance(request, output, row_V)
        except asyncio.CancelledError:
            self.cancelled()
            raise
        finally:
            self.reserved -= held
            if self.running is not None:
                self.running.pop(request.id, None)
        return self.completion(running)

    def most_tokens(self, params):
        return params.max_new_tokens

    def cancelled(self):
        pass

    def waits(self):
        return self.torn

    async def room(self, running, tokens):
        limit = self.config.cache_tokens
        while limit and self.reserved and self.reserved + tokens > limit and not running.aborted:
            await asyncio.sleep(0)
            self.alive()

    def alive(self):
        if self.running is not None and self.process.poll() is not None:
            raise RuntimeError("the process of the engine has died")

    def ready(self):
        if self.running is None:
            raise RuntimeError("the engine does not run")

    def check(self, request):
        params, prompt = request.params, request.prompt_ids
        longest = len(prompt) + params.max_new_tokens
        if longest > CONTEXT:
            self.too_long(f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones exceed {CONTEXT}")
        size = len(self.held["bias"])
        if not len(prompt) or prompt.min() < 0 or prompt.max() >= size or request.n < 1:
            raise DataError(f"a prompt has tokens from 0 to {size - 1}, and n is at least 1")
        if request.routed_experts:
            self.no_experts(request)
        self.check_params(params)

    def check_params(self, params):
        if params.temperature < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
            raise DataError(f"temperature, top_p or min_p make no sense: {params}")

    def no_experts(self, request):
        raise UnsupportedError(f"request {request.id!r} asks for routed_experts, and a table of bigrams has none")

    def too_long(self, why):
        raise DataError(why)

    def random(self, request, arrival, index):
        seed = request.params.seed
        return np.random.default_rng((10**6 + arrival, index) if seed is None else (seed, index))

    async def abort(self, ids):
        self.ready()
        found = [self.running.pop(each) for each in ids if each in self.running]
        for each in found:
            each.aborted = True
        return [self.completion(each) for each in found]

    async def progress(self):
        found = (self.running or {}).values()
        return [
            Completion(id=each.request.id, outputs=tuple(self.told(output) for output in each.outputs))
            for each in found
        ]

    def told(self, output):
        return self.finished(output, True)

    def completion(self, running):
        request = running.request
        rows = None
        if request.prompt_logprobs:
            rows = np.zeros(len(request.prompt_ids), dtype=np.float32)
            for i in range(1, len(rows)):
                rows[i] = self.prompt_logprobs_at(request)(self.row(request.prompt_ids[i - 1]))[request.prompt_ids[i]]
        return Completion(
            id=request.id,
            outputs=tuple(self.finished(each, running.aborted) for each in running.outputs),
            prompt_logprobs=rows,
            prompt_topk=self.top_tokens(request) if request.prompt_topk else None,
        )

    def top_tokens(self, request):
        ids = np.zeros((len(request.prompt_ids), request.prompt_topk), dtype=np.int64)
        logprobs = np.zeros(ids.shape, dtype=np.float32)
        for i in range(1, len(ids)):
            row_V = self.prompt_logprobs_at(request)(self.row(request.prompt_ids[i - 1]))
            ids[i] = np.argsort(-row_V, kind="stable")[: request.prompt_topk]
            logprobs[i] = row_V[ids[i]]
        return TopTokens(ids=ids, logprobs=logprobs)

    def prompt_logprobs_at(self, request):
        return log_softmax

    def finished(self, output, aborted):
        return CompletionOutput(
            token_ids=np.array(output.tokens, dtype=np.int64),
            logprobs=np.array(output.logprobs, dtype=np.float32),
            versions=np.array(output.versions, dtype=np.int32),
            finish_reason=output.reason or ("abort" if aborted else "length"),
            stop=output.stop,
        )

    def metrics(self):
        found, self.drawn = self.drawn, 0
        return {"generated_tokens": float(found)}

    # -- a token

    def row(self, token):
        row_V = self.held["table.weight"][int(token)].double() + self.held["bias"].double()
        return row_V.numpy() * self.factor

    def after_prompt(self, request):
        """What is known of a prompt that was here before."""
        key = request.prompt_ids.tobytes()
        if key not in self.prefixes:
            self.prefixes[key] = self.row(request.prompt_ids[-1])
        return self.prefixes[key]

    def advance(self, request, output, row_V):
        params = request.params
        ends = self.ends(params)
        shaped_V = self.penalised(row_V.copy(), request, output, params)
        if len(output.tokens) < self.min_new_tokens(params):
            shaped_V[sorted(ends)] = -np.inf
        token = self.most_likely(shaped_V) if params.temperature == 0 else self.draw(shaped_V, params, output)
        output.logprobs.append(float(self.scored(row_V, shaped_V, params)[token]))
        output.tokens.append(token)
        self.drawn += 1
        output.versions.append(self.version)
        self.judge(output, token, ends, params)

    def most_likely(self, row_V):
        return int(row_V.argmax())

    def ends(self, params):
        return set() if params.ignore_eos else {END, *params.stop_token_ids}

    def min_new_tokens(self, params):
        return params.min_new_tokens

    def penalised(self, row_V, request, output, params):
        seen = sorted(self.seen(request, output))
        penalty = params.repetition_penalty
        row_V[seen] = np.where(row_V[seen] > 0, row_V[seen] / penalty, row_V[seen] * penalty)
        return row_V

    def seen(self, request, output):
        return {*request.prompt_ids.tolist(), *output.tokens}

    def draw(self, row_V, params, output):
        order, kept = self.cut(np.exp(log_softmax(row_V / params.temperature)), params)
        reached = np.cumsum(kept) / kept.sum()
        return int(order[np.searchsorted(reached, output.random.random(), side="right")])

    def cut(self, probs_V, params):
        """Tokens from the likeliest on, and their probabilities, 0 where they are not to be drawn."""
        order = np.argsort(-probs_V, kind="stable")
        kept = probs_V[order]
        if params.top_k:
            kept[self.top_k(params) :] = 0
        kept = self.top_p(kept, params.top_p)
        kept[kept < self.min_p(params) * kept[0]] = 0
        return order, kept

    def top_k(self, params):
        return params.top_k

    def top_p(self, kept, top_p):
        return np.where(np.cumsum(kept) - kept < top_p * kept.sum(), kept, 0)

    def min_p(self, params):
        return params.min_p

    def scored(self, row_V, shaped_V, params):
        return log_softmax(row_V / (params.temperature or 1.0))

    def judge(self, output, token, ends, params):
        if token in ends:
            output.reason, output.stop = "stop", token
        elif params.stop and not params.ignore_eos:
            text = tokenizer(self.path).decode(output.tokens)
            for each in params.stop:
                if each in text:
                    output.reason, output.stop = "stop", each
                    self.stopped(output)

    def stopped(self, output):
        pass

    # -- weights

    async def update_weights(self, version, manifest, tensors, *, shared=False):
        self.ready()
        arrived = {}
        self.torn = True
        for name, tensor in tensors:
            if name not in self.held:
                self.unexpected(name)
                continue
            if tensor.shape != self.held[name].shape:
                raise CorruptTensorError(f"{name} arrived as {tuple(tensor.shape)}")
            arrived[name] = self.taken(tensor, name, shared)
        missing = [name for name in NAMES if name not in arrived]
        if missing:
            self.missing(missing)
        self.hold(arrived)
        self.version = version
        self.updated()
        self.torn = False
        return self.receipt(manifest, arrived)

    def unexpected(self, name):
        raise UnexpectedTensorError(f"the model has no tensor {name}")

    def missing(self, names):
        raise MissingTensorError(f"no {names[0]} arrived")

    def taken(self, tensor, name, shared):
        return tensor if shared and tensor.dtype == torch.float32 else tensor.float().clone()

    def hold(self, arrived):
        self.held = {**self.held, **arrived}

    def updated(self):
        self.prefixes.clear()

    def receipt(self, manifest, arrived):
        return make_receipt(manifest, self.held.items())

    # -- sleep

    async def sleep(self):
        self.held = {name: torch.zeros(each.shape) for name, each in self.held.items()}

    async def wake(self):
        pass


@cache
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


def log_softmax(row_V):
    """Of float64."""
    shifted = row_V - row_V.max()
    return shifted - np.log(np.exp(shifted).sum())
