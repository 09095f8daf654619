"""Every architecture of the bridge loads, computes, trains, exports and resumes as in transformers."""

from __future__ import annotations

import pytest
import torch
from architectures import MODELS
from megatron_programs import WANT, resume, score_and_train
from test_arrangements import OUTPUTS, VOCABULARY, Arrangement, case_of, run, sizes, steps
from transformers import AutoModelForCausalLM

from roll_strategy_megatron.bridge.registry import BUILTIN
from roll_strategy_megatron.config import DENSE
from roll_testing.bounds import check_near, check_rows, check_same
from roll_testing.losses import TRAINING
from roll_testing.models import make_batch
from roll_testing.reference import Reference, TransformersModel

__all__ = ["run"]
TENSOR, CONTEXT = sizes(tp=2, sp=True), sizes(cp=2)
EXPERTS = TENSOR | sizes(ep=2, etp=1)
BY_SCORES = ("gemma2", "gpt_oss")
"""Their attention scores exist as such, which ranks that share sequences compute in a way of their own."""
ELSEWHERE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""Those that `test_arrangements.py` trains."""


def test_every_architecture_is_tried():
    assert {*MODELS, *ELSEWHERE} == set(BUILTIN)


@pytest.mark.parametrize("model_type", MODELS)
def test_architecture_learns_and_resumes_as_transformers(run, tmp_path, model_type):
    """A step by tensor parallelism, with experts spread over the ranks; and a step on, in stages or with shared
    sequences."""
    first = TENSOR if model_type in DENSE else EXPERTS
    then = CONTEXT if model_type in BY_SCORES else sizes(pp=2)
    case = case_of(Arrangement(ranks=2, model=MODELS[model_type], config=first), tmp_path / "model")
    batch, (one, two) = make_batch(VOCABULARY, seed=10), steps((1, 1), "causal_lm")
    out, state = tmp_path / "out", str(tmp_path / "state")
    answers = run(score_and_train, case, batch, [one], WANT, str(out), state)
    resumed = run(resume, case.with_(strategy_config=then), two, state)

    reference = Reference(TransformersModel(case.model), "causal_lm")
    start, expected = reference.weights(), reference.by_sequence(batch, WANT)
    assert list(answers[0]["before"]) == list(start)
    check_same("weights as they were loaded", answers[0]["before"], start)
    for name, bound in OUTPUTS.items():
        check_rows(name, answers[0]["scored"][name], expected[name], bound)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    check_same("exported", {name: exported[name].numpy() for name in start}, answers[0]["weights"])

    first_step, second_step = reference.train(TRAINING, [one, two])
    stats, weights = resumed[0]
    assert answers[0]["stats"][0].grad_norm == pytest.approx(first_step.grad_norm, rel=1e-4)
    assert stats.grad_norm == pytest.approx(second_step.grad_norm, rel=1e-4)
    went, should = ({name: each[name] - start[name] for name in start} for each in (weights, reference.weights()))
    check_near("the way that the weights went", went, should, 1e-4)
