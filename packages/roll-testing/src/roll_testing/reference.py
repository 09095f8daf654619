"""Reference results of transformers' models and plain torch: one sequence at a time, without padding or packing.

Shapes: L tokens of a sequence, T flat tokens of a batch, V vocabulary size, K top-k or given
ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roll_core.data.pack import pack
from roll_core.spec.train import ParameterState, PortableState, TokenOutputs, WantedOutputs
from roll_modeling.model import DTYPES, quiet
from roll_modeling.optimizer import MOMENTS
from roll_testing.bench import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.train import LossFn, TrainingSpec
    from roll_core.types import Floats, TrainSequence
    from roll_testing.bench import Arrays, Step

    MakeOptimizers = Callable[[Mapping[str, nn.Parameter], TrainingSpec], Sequence[torch.optim.Optimizer]]


class ReferenceModel(ABC):
    """A model whose outputs the kit treats as correct. Authors of a strategy with its own architecture subclass it."""

    module: nn.Module
    """Float32 module on the host. Its `named_parameters` have the names that the strategy exports."""

    @abstractmethod
    def logits(self, tokens_L: Tensor) -> Tensor:
        """Return `[L, V]` logits. Row `t` is the distribution of the token that follows token `t`."""

    def scores(self, tokens_L: Tensor) -> Tensor:
        """Return `[L]`, the scalar head's output at each token, for tasks `value` and `reward`."""
        raise NotImplementedError(f"{type(self).__name__} has no scalar head")


class TransformersModel(ReferenceModel):
    """A checkpoint loaded by transformers, with eager attention."""

    def __init__(self, spec: ModelSpec) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        auto = AutoModelForCausalLM if spec.task == "causal_lm" else AutoModelForSequenceClassification
        with quiet():
            # Weights are rounded to the strategy's dtype, then computed with in float32.
            rounded = auto.from_pretrained(spec.path, dtype=DTYPES[spec.dtype], attn_implementation="eager")
        self.module = rounded.float().eval()

    def logits(self, tokens_L: Tensor) -> Tensor:
        """Run the model's own forward pass."""
        logits_LV: Tensor = self.module(input_ids=tokens_L[None], use_cache=False).logits[0]
        return logits_LV

    def scores(self, tokens_L: Tensor) -> Tensor:
        """Apply the classifier head to every hidden state. The model's own forward pass scores only the last one."""
        module: Any = self.module
        hidden_LH = module.base_model(input_ids=tokens_L[None], use_cache=False).last_hidden_state[0]
        scores_L: Tensor = module.score(hidden_LH)[:, 0]
        return scores_L


def adamw(parameters: Mapping[str, nn.Parameter], training: TrainingSpec) -> Sequence[torch.optim.Optimizer]:
    """Build torch's AdamW with weight decay on matrices only; biases and norms are not decayed."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        foreach=False,
    )
    return [optimizer]


class Reference:
    """Outputs, gradients and optimizer steps of a `ReferenceModel`, as the train contract defines them."""

    def __init__(self, model: ReferenceModel, task: str, optimizers: MakeOptimizers | None = None) -> None:
        self.model, self.task = model, task
        self._optimizers = optimizers or adamw
        self.parameters = dict(model.module.named_parameters())
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    # -- computing -----------------------------------------------------------------------------------------------------

    def outputs(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> TokenOutputs:
        """Return outputs of the flat batch, with gradients."""
        rows = [self._row(sequence, want) for sequence in sequences]
        return TokenOutputs(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})

    def by_sequence(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> dict[str, dict[str, Floats]]:
        """Return outputs without gradients, by output name and then by sequence id."""
        by_name: dict[str, dict[str, Floats]] = {}
        with torch.no_grad():
            for sequence in sequences:
                for name, tensor in self._row(sequence, want).items():
                    by_name.setdefault(name.rpartition("_")[0], {})[sequence.id] = as_array(tensor)
        return by_name

    def _row(self, sequence: TrainSequence, want: WantedOutputs) -> dict[str, Tensor]:
        tokens_L = torch.from_numpy(sequence.tokens).long()
        tensors: dict[str, Tensor] = {}
        if want.values:
            scores_L = self.model.scores(tokens_L).float()
            if self.task == "value":  # the state before token t is the state after token t - 1
                scores_L = torch.cat([scores_L.new_zeros(1), scores_L[:-1]])
            tensors["values_T"] = scores_L
        if not want.head:
            return tensors
        all_LV = torch.log_softmax(self.model.logits(tokens_L).float() / want.temperature, dim=-1)[:-1]
        if want.logprobs:
            tensors["logprobs_T"] = _after_nothing(all_LV.gather(1, tokens_L[1:, None])[:, 0])
        if want.entropy:
            tensors["entropy_T"] = _after_nothing(-(all_LV.exp() * all_LV).sum(-1))
        if want.topk:
            best = all_LV.topk(want.topk, dim=-1)
            tensors["topk_logprobs_TK"] = _after_nothing(best.values)
            tensors["topk_ids_TK"] = _after_nothing(best.indices)
        if want.gathered and sequence.gather_ids is not None:
            ids_LK = torch.from_numpy(sequence.gather_ids)
            tensors["gathered_logprobs_TK"] = _after_nothing(all_LV.gather(1, ids_LK[1:]))
        return tensors

    def gradient(self, sequences: Sequence[TrainSequence], loss: LossFn) -> Arrays:
        """Return the gradient of the whole batch's loss, by parameter name."""
        self._backward(sequences, loss)
        gradients = {
            name: as_array(parameter.grad) for name, parameter in self.parameters.items() if parameter.grad is not None
        }
        self.model.module.zero_grad(set_to_none=True)
        return gradients

    def _backward(self, sequences: Sequence[TrainSequence], loss: LossFn) -> float:
        (flat,) = pack(sequences)
        result = loss(self.outputs(sequences, loss.want), flat)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return float(result.loss.detach())

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, training: TrainingSpec, steps: Sequence[Step]) -> Iterator[ReferenceStep]:
        """Run one optimizer step after the other and yield a `ReferenceStep` for each.

        Uses the strategy's own optimizers (default: torch's AdamW) and transformers' learning-rate schedules.
        """
        from transformers import get_scheduler

        self.optimizers = optimizers = self._optimizers(self.parameters, training)
        schedules = [
            get_scheduler(
                training.lr_scheduler_type,
                optimizer,
                num_warmup_steps=training.warmup_steps,
                num_training_steps=training.num_steps,
                scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
            )
            for optimizer in optimizers
        ]
        for step in steps:
            loss = self._backward(step.sequences, step.loss)
            limit = training.max_grad_norm or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
            learning_rate = float(optimizers[0].param_groups[0]["lr"])
            for part in (*optimizers, *schedules):
                part.step()
            self.model.module.zero_grad(set_to_none=True)
            yield ReferenceStep(loss=loss, grad_norm=norm, learning_rate=learning_rate)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Arrays]:
        """Return master weights and moments after steps of `train`, by kind and then by parameter name."""
        (optimizer,) = self.optimizers
        held = {name: optimizer.state[parameter] for name, parameter in self.parameters.items()}
        moments = {kind: {name: as_array(state[kind]) for name, state in held.items()} for kind in MOMENTS}
        return {"master": self.weights(), **moments}

    def portable_state(self, step_count: int) -> PortableState:
        """Return `state` in the form that strategies exchange, with the given step count."""
        held = self.state()

        def read(name: str) -> ParameterState:
            return ParameterState(**{kind: torch.from_numpy(tensors[name]) for kind, tensors in held.items()})

        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        return PortableState(step_count=step_count, shapes=shapes, read=read)

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self) -> Arrays:
        """Return the parameters by name. A tied parameter appears once."""
        return {name: as_array(parameter) for name, parameter in self.parameters.items()}

    def aliases(self) -> set[str]:
        """Return every name under which a parameter may be exported, including all names of tied parameters."""
        return set(self.model.module.state_dict())

    def take(self, weights: Mapping[str, Floats]) -> None:
        """Replace the weights. Raises `KeyError` if one is missing."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(weights[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """Loss, gradient norm before clipping, and learning rate of one step."""

    loss: float
    grad_norm: float
    learning_rate: float


def _after_nothing(rows: Tensor) -> Tensor:
    """Shift rows by one, so that index `t` belongs to token `t`. The first token, which has no prediction, gets 0."""
    return torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows])
