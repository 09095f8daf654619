"""Losses of routers are in the gradient as plain torch puts them there, whatever the arrangement, and are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F
from megatron_programs import DEEPSEEK, MIXTURE, case_on, score_and_train
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll_core.data.pack import pack
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, distance
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES, TRAINING
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import fail_to_build
from roll_testing.reference import Reference, TransformersModel

VOCABULARY = 61
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
BOTH = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}
"""Far more than anybody wants, so that the other losses do not hide them."""
EP = {"expert_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}


class Balanced(Reference):
    """Transformers' model; the losses of its routers are put together from the logits of each sequence by itself."""

    def __init__(self, model, config):
        super().__init__(model, "causal_lm")
        self.config, self.logits_LE = config, []
        self.settings = model.module.config
        for name, module in model.module.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._keep)
        self.reported = []

    def _keep(self, gate, inputs, _output):
        hidden_LH = inputs[0].reshape(-1, inputs[0].shape[-1])
        self.logits_LE.append(F.linear(hidden_LH.float(), gate.weight.float()))

    def _balance(self, logits_LE):
        experts, top = logits_LE.shape[1], self.settings.num_experts_per_tok
        if self.settings.model_type == "qwen3_moe":
            return load_balancing_loss_func((logits_LE,), experts, top) / top
        scores_LE = logits_LE.sigmoid() / logits_LE.sigmoid().sum(dim=1, keepdim=True)
        chosen_LK = scores_LE.topk(top, dim=1).indices
        total = 0.0
        for expert in range(experts):
            share = (chosen_LK == expert).float().sum() / (top * len(scores_LE))
            total = total + experts * share * scores_LE[:, expert].mean()
        return total

    def _backward(self, sequences, loss):
        self.logits_LE.clear()
        (flat,) = pack(sequences)
        found = loss(self.outputs(sequences, loss.want), flat)
        layers = len(self.logits_LE) // len(sequences)
        balance = z = 0.0
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


def case_of(folder, architecture, ranks, config, *, checkpointing=False):
    model = write_checkpoint(folder, architecture, task="causal_lm", vocab_size=VOCABULARY)
    return case_on(ranks, config, replace(model, gradient_checkpointing=checkpointing))


def steps(calls=1):
    split = Split(max_sequences=3)
    return [
        Step(sequences=make_batch(VOCABULARY, seed=seed), loss=LOSSES["sft"], split=split, calls=calls)
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("architecture", "ranks", "config", "checkpointing"),
    [
        pytest.param(MIXTURE, 1, BOTH, False, id="one rank"),
        pytest.param(MIXTURE, 2, BOTH | EP, False, id="experts over replicas"),
        pytest.param(MIXTURE, 2, BOTH | TP, True, id="tensor, layers recomputed"),
        pytest.param(MIXTURE, 2, BOTH | PP, True, id="stages, layers recomputed"),
        pytest.param(MIXTURE, 2, BOTH | CP, False, id="context"),
        pytest.param(MIXTURE, 1, BOTH | {"moe_layer_recompute": True}, True, id="experts recomputed"),
        pytest.param(MIXTURE, 1, {"moe_aux_loss_coeff": 0.5}, False, id="balance alone", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 1, {"moe_z_loss_coeff": 0.05}, False, id="z alone", marks=pytest.mark.slow),
        pytest.param(
            DEEPSEEK, 2, BOTH | EP | TP | WHOLE_EXPERTS, False, id="deepseek, experts, tensor", marks=pytest.mark.slow
        ),
        pytest.param(MIXTURE, 4, BOTH | CP | TP, False, id="tensor, context", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 4, BOTH | EP | PP, False, id="experts, stages", marks=pytest.mark.slow),
    ],
)
def test_router_losses_have_equal_gradients_for_any_split(host, tmp_path, architecture, ranks, config, checkpointing):
    case = case_of(tmp_path, architecture, ranks, config, checkpointing=checkpointing)
    every = steps(calls=2)
    answers = host.run(
        score_and_train, case, every[0].sequences, every, WantedOutputs(logprobs=True), num_ranks=ranks, timeout_s=200
    )
    leaders = [each for each in answers if each["place"].leader]
    reference, plain = (Balanced(TransformersModel(case.model), each) for each in (config, {}))
    start = reference.weights()
    for at, right in enumerate(reference.train(TRAINING, every)):
        assert leaders[0]["stats"][at].grad_norm == pytest.approx(right.grad_norm, rel=1e-4)
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(right.loss, rel=1e-4)
        for name, key in (("load_balancing_loss", "moe_aux_loss_coeff"), ("router_z_loss", "moe_z_loss_coeff")):
            shares = [each["metrics"][at].get(name) for each in leaders]
            if key in config:
                assert sum(each or 0.0 for each in shares) == pytest.approx(reference.reported[at][name], rel=1e-4)
            else:
                assert shares == [None] * len(leaders)
    list(plain.train(TRAINING, every))
    went = {name: leaders[0]["weights"][name] - each for name, each in start.items()}
    should, without = (
        {name: each - start[name] for name, each in found.weights().items()} for found in (reference, plain)
    )
    check_near("the way that the weights went", went, should, 1e-4)
    assert distance(without, should) > 1e-2


def test_experts_that_a_model_does_not_have_cannot_be_balanced(host, tmp_path):
    case = case_of(tmp_path, QWEN3, 1, {"moe_aux_loss_coeff": 0.001})
    ((error, _),) = host.run(fail_to_build, case, timeout_s=100)
    assert error.kinds[0] == "ModelError"
    assert mentions(error.message, "experts")
