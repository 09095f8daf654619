"""A language model as small as can be: a table of the logits of the next token given the last one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roll_core.algorithms.optimizers import adamw
from roll_core.errors import (
    CheckpointError,
    CorruptTensorError,
    DataError,
    MissingTensorError,
    ModelError,
    UnexpectedTensorError,
    UnsupportedError,
)
from roll_core.spec.infer import InferStrategy
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import LossFn, LossMetrics, MicroBatch, StepStats, TokenOutputs, TrainStrategy, WantedOutputs
from roll_core.spec.weights import make_receipt
from roll_core.types import (
    Completion,
    CompletionOutput,
    GenerateRequest,
    SamplingParams,
    WeightManifest,
    WeightReceipt,
)
from roll_modeling.optimizer import clip_factor, moments, schedule
from roll_modeling.task_model import finite_loss, plain_metrics


def logprobs_of(table_VV: torch.Tensor, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
    """Logprobs and entropy of each token given the one before it."""
    if want.topk or want.gathered or want.values:
        raise UnsupportedError("a bigram table has neither top-k logprobs nor values")
    before_T = micro.tokens_T.roll(1)
    all_TV = torch.log_softmax(table_VV[before_T] / want.temperature, dim=-1)
    chosen_T = all_TV.gather(1, micro.tokens_T[:, None])[:, 0]
    inside_T = (micro.positions_T > 0).float()
    entropy_T = -(all_TV.exp() * all_TV).sum(-1)
    return TokenOutputs(
        logprobs_T=chosen_T * inside_T if want.logprobs else None,
        entropy_T=entropy_T * inside_T if want.entropy else None,
    )


class BigramTrainStrategy(TrainStrategy):
    """The table, stepped by AdamW."""

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        if model.task != "causal_lm":
            raise UnsupportedError(f"a bigram table is a language model, it has no task {model.task}")
        self._mesh = mesh
        size = self.config.vocabulary
        self.table_VV = torch.zeros(size, size, requires_grad=self.training is not None)
        self.steps = 0
        if self.training is not None:
            self.optimizer = adamw({"table": self.table_VV}, self.training)
            self.schedule = schedule(self.training)

    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        with torch.no_grad():
            return logprobs_of(self.table_VV, micro, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        self._trains()
        found = []
        for micro in micros:
            outputs = logprobs_of(self.table_VV, micro, loss.want)
            output = finite_loss(loss, outputs, micro)
            output.loss.backward()
            found.append(plain_metrics(output))
        return found

    def optimizer_step(self) -> StepStats:
        self._trains()
        gradient, rate = self.table_VV.grad, self.training.learning_rate * self.schedule(self.steps)
        norm = float(gradient.norm()) if gradient is not None else 0.0
        skipped = not math.isfinite(norm)
        if gradient is not None and not skipped:
            gradient *= clip_factor(norm, self.training.max_grad_norm)
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.step()
            self.steps += 1
        self.table_VV.grad = None
        return StepStats(grad_norm=norm, learning_rate=rate, skipped=skipped)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "table", self.table_VV.detach()

    def save(self, path: Path) -> None:
        save_file({name: each.contiguous() for name, each in self._state().items()}, path / "table.safetensors")
        (path / "steps.json").write_text(json.dumps(self.steps), encoding="utf-8")

    def load(self, path: Path) -> None:
        try:
            stored = load_file(path / "table.safetensors")
            self.steps = json.loads((path / "steps.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the table cannot be read: {error}") from error
        with torch.no_grad():
            for name, tensor in self._state().items():
                tensor.copy_(stored[name])
        if self.training is not None:
            self.optimizer.state[self.table_VV]["step"].fill_(float(self.steps))
        self.table_VV.grad = None

    def _state(self) -> dict[str, torch.Tensor]:
        """What is saved: the table and, where it is trained, its moments."""
        found = {"table": self.table_VV.detach()}
        if self.training is not None:
            found["first"], found["second"] = moments(self.optimizer, self.table_VV)
        return found

    def _trains(self) -> None:
        if self.training is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores: it has no optimizer")


class BigramInferStrategy(InferStrategy):
    """Draws one token after the other; nothing runs long enough to be aborted."""

    table_VV: torch.Tensor | None = None

    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """From a table that the train strategy saved, or from nothing."""
        if model.path:
            try:
                self.table_VV = load_file(Path(model.path) / "table.safetensors")["table"]
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{model.path}: there is no table to be read: {error}") from error
        else:
            self.table_VV = torch.zeros(self.config.vocabulary, self.config.vocabulary)
        self.version, self.arrivals, self.sampling_seed = 0, itertools.count(), mesh.sampling_seed

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check(request)
        seed = request.params.seed
        key = (1, self.sampling_seed, next(self.arrivals)) if seed is None else (0, seed)
        return Completion(id=request.id, outputs=tuple(self._draw(request, (*key, i)) for i in range(request.n)))

    def _check(self, request: GenerateRequest) -> None:
        params, prompt = request.params, request.prompt_ids
        plain = SamplingParams()
        refused = [
            name
            for name in ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens", "stop")
            if getattr(params, name) != getattr(plain, name)
        ]
        if request.prompt_logprobs:
            refused.append("prompt_logprobs")
        if request.routed_experts:
            refused.append("routed_experts")
        if refused:
            raise UnsupportedError(f"a bigram table does without {', '.join(refused)}; leave them as they are")
        size = len(self._table())
        if not len(prompt) or prompt.min() < 0 or prompt.max() >= size:
            raise DataError(f"a prompt has at least one token, and tokens from 0 to {size - 1}")
        if params.temperature < 0 or request.n < 1:
            raise DataError(f"temperature {params.temperature} or n {request.n} makes no sense")

    def _draw(self, request: GenerateRequest, key: tuple[int, ...]) -> CompletionOutput:
        params, rng = request.params, np.random.default_rng(key)
        ends = () if params.ignore_eos else params.stop_token_ids
        all_VV = torch.log_softmax(self._table() / (params.temperature or 1.0), dim=-1)
        token, ids, logprobs = int(request.prompt_ids[-1]), [], []
        for _ in range(params.max_new_tokens):
            row_V = all_VV[token].double().exp().numpy()
            greedy = params.temperature == 0
            before, token = token, int(row_V.argmax() if greedy else rng.choice(len(row_V), p=row_V / row_V.sum()))
            ids.append(token)
            logprobs.append(float(all_VV[before, token]))
            if token in ends:
                break
        ended = bool(ids) and ids[-1] in ends
        return CompletionOutput(
            token_ids=np.array(ids, dtype=np.int64),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(len(ids), self.version, dtype=np.int32),
            finish_reason="stop" if ended else "length",
            stop=ids[-1] if ended else None,
        )

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        return []

    async def update_weights(
        self,
        version: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        shared: bool = False,
    ) -> WeightReceipt:
        held = self._table()
        given: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if name != "table":
                raise UnexpectedTensorError(f"{name} arrived; a bigram model has nothing but a table")
            if tensor.shape != held.shape:
                raise CorruptTensorError(f"table arrived as {tuple(tensor.shape)}, it has {tuple(held.shape)}")
            given[name] = tensor if shared else tensor.to(held.dtype, copy=True)
        if not given:
            raise MissingTensorError("the table is missing")
        self.table_VV, self.version = given["table"], version
        return make_receipt(manifest, [("table", self.table_VV)])

    async def stop(self) -> None:
        self.table_VV = None

    def _table(self) -> torch.Tensor:
        if self.table_VV is None:
            raise RuntimeError("there is no table: start comes first, and nothing after stop")
        return self.table_VV
