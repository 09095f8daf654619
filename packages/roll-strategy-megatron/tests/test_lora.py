"""Adapters on layers that ranks share learn as peft's do on one rank, and go out in peft's form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import MODELS
from megatron_programs import (
    MIXTURE,
    adapters_around,
    case_on,
    resume,
    save_after,
    score_and_train,
    train_and_export,
)
from peft import PeftModel
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from roll_core.errors import CheckpointError, ModelError, UnsupportedError
from roll_core.spec.model import LoraSpec
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, check_rows, check_same, distance
from roll_testing.errors import raises_error
from roll_testing.losses import LOSSES, OF_TASK, TRAINING
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import fail_to_build
from roll_testing.ranks import RanksFailedError, free_port
from roll_testing.reference import Reference, TransformersModel

FOUR = QWEN3 | {"num_hidden_layers": 4}
TP = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
WHOLE = {"expert_tensor_parallel_size": 1}
SOME = LoraSpec(targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), rank=3, alpha=6.0)
EXPERTS = LoraSpec(targets=("o_proj", "gate_proj", "down_proj"), rank=2, alpha=6.0)
ALL = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
WITH_NORMS = replace(SOME, extra_modules=("input_layernorm", "embed_tokens"))
WANT = WantedOutputs(logprobs=True, entropy=True)


def case_of(model, lora, config=None, ranks=1, name="megatron_train"):
    return case_on(ranks, config or {}, replace(model, lora=lora, seed=3), name=name)


def steps(number, task="causal_lm"):
    split = Split(max_sequences=3)
    return [Step(sequences=make_batch(61, seed=i), loss=OF_TASK[task], split=split) for i in range(number)]


@pytest.mark.parametrize(
    ("architecture", "lora", "config", "ranks", "task"),
    [
        pytest.param(QWEN3, SOME, SP, 2, "causal_lm", id="tensor and sequence"),
        pytest.param(FOUR, ALL, VPP, 2, "causal_lm", id="interleaved stages"),
        pytest.param(MODELS["phi3"], ALL, SP, 2, "causal_lm", id="fused layers, tensor and sequence"),
        pytest.param(QWEN3, SOME, TP, 4, "causal_lm", id="tensor and data", marks=pytest.mark.slow),
        pytest.param(QWEN3, ALL, CP, 2, "causal_lm", id="context", marks=pytest.mark.slow),
        pytest.param(QWEN3, WITH_NORMS, SP, 2, "causal_lm", id="beside whole modules", marks=pytest.mark.slow),
        pytest.param(QWEN3, SOME, SP | PP, 4, "value", id="of a critic", marks=pytest.mark.slow),
    ],
)
def test_they_learn_as_those_of_hf_train_do(host, tmp_path, architecture, lora, config, ranks, task):
    check_against_hf_train(host, tmp_path, architecture, lora, config, ranks, task)


def check_against_hf_train(host, tmp_path, architecture, lora, config, ranks, task="causal_lm"):
    model = write_checkpoint(tmp_path, architecture, task=task, vocab_size=61)
    want = WANT if task == "causal_lm" else WantedOutputs(values=True)
    arguments = make_batch(61, seed=10), steps(3, task), want
    expected = score_and_train(0, case_of(model, lora, name="hf_train").with_(master_port=0), *arguments)
    answers = host.run(score_and_train, case_of(model, lora, config, ranks), *arguments, num_ranks=ranks, timeout_s=200)
    leaders = [each for each in answers if each["place"].leader]
    for name in expected["scored"]:
        rows = {key: row for each in leaders for key, row in each["scored"][name].items()}
        check_rows(name, rows, expected["scored"][name], 1e-4)
    for at, right in enumerate(expected["stats"]):
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(expected["losses"][at], rel=1e-4)
        assert all(each["stats"][at].grad_norm == pytest.approx(right.grad_norm, rel=1e-4) for each in answers)
    start = expected["before"]
    went = {name: leaders[0]["weights"][name] - each for name, each in start.items()}
    should = {name: each - start[name] for name, each in expected["weights"].items()}
    check_near("the way that merged weights went", went, should, 1e-4)


class LowRank(nn.Module):
    """W + scale · B A of every expert, of some rows of W."""

    def __init__(self, whole, scale, parts):
        super().__init__()
        self.scale, self.parts = scale, nn.ParameterList()
        self.rows = [rows for rows, _, _ in parts]
        for _, a, b in parts:
            self.parts += [nn.Parameter(torch.from_numpy(a)), nn.Parameter(torch.from_numpy(b))]

    def forward(self, weight):
        deltas = torch.zeros_like(weight)
        for at, (first, last) in enumerate(self.rows):
            deltas[..., first:last, :] += self.scale * self.parts[2 * at + 1] @ self.parts[2 * at]
        return weight + deltas


def adapt(module, factors, scale):
    """Put what the strategy says its adapters are into transformers' model."""
    for layer in range(2):
        block = module.model.layers[layer]
        name = f"model.layers.{layer}.self_attn.o_proj"
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        low = LowRank(None, scale, [((0, b.shape[0]), a, b / scale)])
        parametrize.register_parametrization(block.self_attn.o_proj, "weight", low)
        stacked = {
            (part, side): np.stack(
                [factors[f"model.layers.{layer}.mlp.experts.{each}.{part}.lora_{side}.weight"] for each in range(4)]
            )
            for part in ("gate_proj", "down_proj")
            for side in "AB"
        }
        for owner, part in (("gate_up_proj", "gate_proj"), ("down_proj", "down_proj")):
            a, b = stacked[part, "A"], stacked[part, "B"]
            low = LowRank(None, scale, [((0, b.shape[1]), a, b / scale)])
            parametrize.register_parametrization(block.mlp.experts, owner, low)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param({}, 1, id="one rank"),
        pytest.param(EP, 2, id="spread"),
        pytest.param(SP, 2, id="cut"),
        pytest.param(EP | PP, 4, id="spread over stages"),
        pytest.param(EP | SP | WHOLE, 2, id="spread, beside tensor"),
        pytest.param(SP | WHOLE, 2, id="whole, beside tensor"),
        pytest.param({"expert_tensor_parallel_size": 2}, 2, id="cut by replicas"),
    ],
)
def test_experts_have_them_too(host, tmp_path, config, ranks):
    check_adapters_of_experts(host, tmp_path, config, ranks)


def check_adapters_of_experts(host, tmp_path, config, ranks):
    model = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    case = case_of(model, EXPERTS, config, ranks)
    answers = host.run(adapters_around, case, steps(3), num_ranks=ranks, timeout_s=200)
    before, stats, after = answers[0]
    reference = Reference(TransformersModel(model), "causal_lm")
    adapt(reference.model.module, before, EXPERTS.scale)
    reference.parameters = dict(reference.model.module.named_parameters())
    for name, each in reference.parameters.items():
        each.requires_grad_(".parts." in name)
    right = list(reference.train(TRAINING, steps(3)))
    assert [each.grad_norm for each in stats] == pytest.approx([each.grad_norm for each in right], rel=1e-4)
    merged = reference.model.module.model.layers[1].mlp.experts.down_proj.detach().numpy()
    base = reference.model.module.model.layers[1].mlp.experts.parametrizations.down_proj.original.detach().numpy()
    for expert in range(4):
        place = f"model.layers.1.mlp.experts.{expert}.down_proj"
        delta = after[f"{place}.lora_B.weight"] @ after[f"{place}.lora_A.weight"]
        assert distance({"delta": delta}, {"delta": merged[expert] - base[expert]}) < 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_what_is_exported_and_computes_the_same(host, tmp_path):
    model = write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=61)
    for form in ("adapter", "merged"):
        case = case_of(model, replace(SOME, export=form), SP, 2)
        host.run(train_and_export, case, str(tmp_path / form), steps(2), num_ranks=2, timeout_s=100)
    tokens = torch.arange(12)[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.path), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        found, expected = adapted(tokens).logits, merged(tokens).logits
        start = AutoModelForCausalLM.from_pretrained(model.path)(tokens).logits
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found - start).abs().max()) > 1e-2


def test_adapters_resume_on_other_ranks_but_not_on_another_base(host, tmp_path):
    model = write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=61)
    folder = str(tmp_path / "state")
    expected, weights = host.run(save_after, case_of(model, SOME, SP, 2), steps(2), folder, num_ranks=2, timeout_s=100)[
        0
    ]
    case = case_of(model, SOME, PP, 2)
    found, again = host.run(resume, case, steps(2)[-1], folder, num_ranks=2, timeout_s=100)[0]
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert distance(again, weights) < 1e-5
    other = write_checkpoint(tmp_path / "other", QWEN3 | {"num_hidden_layers": 3}, task="causal_lm", vocab_size=61)
    with raises_error(RanksFailedError, CheckpointError.__name__):
        host.run(resume, case_of(other, SOME), steps(1)[0], folder, num_ranks=1, timeout_s=100)


def test_factors_in_float32_resume_beside_whole_modules_in_bf16(host, tmp_path):
    """Megatron's optimizer updates both in one group."""
    model = replace(write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=61), dtype="bf16")
    case, folder = case_of(model, WITH_NORMS, SP, 2), str(tmp_path / "state")
    expected, weights = host.run(save_after, case, steps(2), folder, num_ranks=2, timeout_s=100)[0]
    again = case.with_(master_port=free_port())
    found, resumed = host.run(resume, again, steps(2)[-1], folder, num_ranks=2, timeout_s=100)[0]
    assert found == expected
    check_same("weights", resumed, weights)


@pytest.mark.parametrize(
    ("architecture", "lora", "kind", "said"),
    [
        (QWEN3, replace(SOME, targets=("lm_head",)), UnsupportedError, "lm_head"),
        (QWEN3, replace(SOME, targets=("q_prj",)), ModelError, "did you mean 'q_proj'?"),
        (QWEN3, replace(ALL, targets=("o_proj",), extra_modules=("q_proj",)), UnsupportedError, "in one tensor"),
        (MIXTURE, replace(EXPERTS, targets=("up_proj",)), ModelError, "up_proj"),
        (MODELS["qwen2_moe"], ALL, UnsupportedError, "shared_expert_gate"),
    ],
    ids=["output layer", "misspelt", "part of a tensor", "experts alone", "gate of a shared expert"],
)
def test_targets_that_cannot_be_are_refused(host, tmp_path, architecture, lora, kind, said):
    model = write_checkpoint(tmp_path, architecture, task="causal_lm", vocab_size=61)
    ((error, _),) = host.run(fail_to_build, case_of(model, lora), timeout_s=100)
    assert error is not None
    assert error.kinds[0] == kind.__name__, error
    assert said in error.message


def test_a_role_without_adapters_has_none_to_export(host, tmp_path):
    model = write_checkpoint(tmp_path, QWEN3, task="causal_lm", vocab_size=61)
    with raises_error(RanksFailedError, "UnsupportedError"):
        host.run(
            adapters_around, case_of(model, None), [Step(sequences=make_batch(61), loss=LOSSES["sft"])], timeout_s=100
        )
