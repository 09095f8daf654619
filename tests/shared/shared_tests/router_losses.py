"""Reference of routers' auxiliary losses, and their check on a strategy's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll_core.data.pack import pack
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, distance
from roll_testing.losses import LOSSES
from roll_testing.models import make_batch
from roll_testing.programs import train
from roll_testing.reference import Reference, TransformersModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roll_testing.bench import Case

ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}
"""Far larger than useful, so that the other losses do not hide them."""
METRICS = (("load_balancing_loss", "moe_aux_loss_coeff"), ("router_z_loss", "moe_z_loss_coeff"))


class Balanced(Reference):
    """Transformers' model; the losses of its routers are put together from the logits of each sequence by itself."""

    def __init__(self, model: TransformersModel, config: Any) -> None:
        super().__init__(model, "causal_lm")
        self.config: Any = config
        self.logits_LE: list[Tensor] = []
        self.settings: Any = model.module.config
        for name, module in model.module.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._keep)
        self.reported: list[dict[str, float]] = []

    def _keep(self, gate: Any, inputs: Any, _output: Any) -> None:
        hidden_LH = inputs[0].reshape(-1, inputs[0].shape[-1])
        self.logits_LE.append(F.linear(hidden_LH.float(), gate.weight.float()))

    def _balance(self, logits_LE: Tensor) -> Any:
        experts, top = logits_LE.shape[1], self.settings.num_experts_per_tok
        if self.settings.model_type == "qwen3_moe":
            return load_balancing_loss_func((logits_LE,), experts, top) / top
        scores_LE = logits_LE.sigmoid() / logits_LE.sigmoid().sum(dim=1, keepdim=True)
        chosen_LK = scores_LE.topk(top, dim=1).indices
        total: Any = 0.0
        for expert in range(experts):
            share = (chosen_LK == expert).float().sum() / (top * len(scores_LE))
            total = total + experts * share * scores_LE[:, expert].mean()
        return total

    def _backward(self, sequences: Any, loss: Any) -> float:
        self.logits_LE.clear()
        (flat,) = pack(sequences)
        found = loss(self.outputs(sequences, loss.want), flat)
        layers = len(self.logits_LE) // len(sequences)
        balance: Any = 0.0
        z: Any = 0.0
        for at, sequence in enumerate(sequences):
            for logits_LE in self.logits_LE[at * layers : (at + 1) * layers] if sequence.loss_mask.any() else ():
                balance = balance + self._balance(logits_LE) / flat.totals.sequences
                z = z + logits_LE.logsumexp(dim=1).square().mean() / flat.totals.sequences
        extra = self.config.get("moe_aux_loss_coeff", 0.0) * balance + self.config.get("moe_z_loss_coeff", 0.0) * z
        (found.loss + extra).backward()
        self.reported.append(
            {"load_balancing_loss": float(balance.detach()) / layers, "router_z_loss": float(z.detach()) / layers}
        )
        return float(found.loss.detach())


def check_router_losses(run: Callable[..., tuple[Any, ...]], case: Case, vocab_size: int) -> None:
    """Fail unless loss, metrics, gradient norms and weights of two steps are those of `Balanced`."""
    steps = [
        Step(sequences=make_batch(vocab_size, seed=seed), loss=LOSSES["sft"], split=Split(max_sequences=3), calls=2)
        for seed in range(2)
    ]
    assert case.training is not None
    answers = run(train, case, steps)
    leaders = [answer for answer in answers if answer.data_rank.leader]
    reference = Balanced(TransformersModel(case.model), case.strategy_config)
    without = Balanced(TransformersModel(case.model), {})
    for step, expected in enumerate(reference.train(case.training, steps)):
        assert leaders[0].stats[step].grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert sum(leader.metrics[step].get("loss", 0.0) for leader in leaders) == pytest.approx(
            expected.loss, rel=1e-4
        )
        for name, key in METRICS:
            shares = [leader.metrics[step].get(name, 0.0) for leader in leaders]
            if key in case.strategy_config:
                assert sum(shares) == pytest.approx(reference.reported[step][name], rel=1e-4)
            else:
                assert not any(shares)
    list(without.train(case.training, steps))
    before = leaders[0].before
    change = {name: leaders[0].after[name] - tensor for name, tensor in before.items()}
    expected_change, other = (
        {name: tensor - before[name] for name, tensor in model.weights().items()} for model in (reference, without)
    )
    check_near("the change of the weights", change, expected_change, 1e-4)
    assert distance(other, expected_change) > 1e-2
