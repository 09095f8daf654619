"""However a model is spread over ranks, it computes and learns as plain torch and transformers have it on one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from architectures import MODELS
from divisions import DIVISIONS
from megatron_programs import DEEPSEEK, MIXTURE, WANT, case_on, offloaded, score_and_train, train_unchecked
from safetensors.torch import load_file, save_file

from roll_core.data.pack import pack
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, check_rows, check_same
from roll_testing.losses import OF_TASK, TRAINING
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import score
from roll_testing.ranks import free_port
from roll_testing.reference import Reference, TransformersModel
from roll_testing.train_kit import registry

TIED = QWEN3 | {"tie_word_embeddings": True}
QWEN2 = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {"model_type": "qwen2"}
LLAMA = QWEN3 | {
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
MISTRAL = QWEN3 | {"model_type": "mistral", "sliding_window": 4}
MIXTRAL = QWEN3 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
WHOLE_QUERIES = DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 3}
FOUR, SIX, EIGHT = ({"num_hidden_layers": each} for each in (4, 6, 8))
VOCABULARY = 61
"""Odd: tensor parallel ranks have rows of padding."""
OUTPUTS = {"logprobs": 1e-4, "entropy": 1e-4, "topk_logprobs": 1e-4, "topk_ids": 0.0}


def sizes(**short):
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "layout": "pipeline_model_parallel_layout",
        "etp": "expert_tensor_parallel_size",
        "sp": "sequence_parallel",
    }
    return {names.get(key, key): value for key, value in short.items()}


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    ranks: int
    model: dict = field(default_factory=lambda: QWEN3)
    config: dict = field(default_factory=dict)
    checkpointing: bool = False
    calls: tuple[int, ...] = (1, 1, 1)
    """Over which the microbatches of each step are spread."""
    task: str = "causal_lm"


QUICK = {
    "dp 2, overlapped, several calls": Arrangement(
        ranks=2, config={"overlap_grad_reduce": True, "ddp_bucket_size": 2000}, calls=(2, 1, 3)
    ),
    "llama, scaled rotation": Arrangement(ranks=1, model=LLAMA),
    "deepseek": Arrangement(ranks=1, model=DEEPSEEK),
    "mistral, window": Arrangement(ranks=1, model=MISTRAL),
    "tp 2, in small chunks": Arrangement(ranks=2, config=sizes(tp=2, logprob_chunk_tokens=4)),
    "tp 2, sp": Arrangement(ranks=2, config=sizes(tp=2, sp=True), model=QWEN2),
    "pp 2, tied": Arrangement(ranks=2, config=sizes(pp=2), model=TIED),
    "pp 2, vpp 2, tied": Arrangement(ranks=2, config=sizes(pp=2, vpp=2), model=TIED | FOUR),
    "values, tp 2, sp": Arrangement(ranks=2, config=sizes(tp=2, sp=True), task="value"),
    "cp 2": Arrangement(ranks=2, config=sizes(cp=2)),
    "ep 2": Arrangement(ranks=2, config=sizes(ep=2), model=MIXTURE),
}
PRODUCTS = {
    "deepseek, ep 2, tp 2, sp": Arrangement(ranks=2, config=sizes(ep=2, tp=2, etp=1, sp=True), model=DEEPSEEK),
    "deepseek, expert tp 2, sp": Arrangement(ranks=2, config=sizes(tp=2, sp=True), model=DEEPSEEK),
    "deepseek, pp 2, vpp 2": Arrangement(ranks=2, config=sizes(pp=2, vpp=2), model=DEEPSEEK),
    "deepseek, cp 2": Arrangement(ranks=2, config=sizes(cp=2, ep=2), model=DEEPSEEK),
    "deepseek, layers recomputed": Arrangement(ranks=1, model=DEEPSEEK, checkpointing=True),
    "deepseek, no choice among groups": Arrangement(
        ranks=1, model=DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    ),
    "deepseek, queries whole, tp 2, sp": Arrangement(ranks=2, config=sizes(tp=2, sp=True), model=WHOLE_QUERIES),
    "gemma 3, pp 2, vpp 2, layers recomputed": Arrangement(
        ranks=2,
        config=sizes(pp=2, vpp=2),
        model=MODELS["gemma3_text"] | FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        checkpointing=True,
    ),
    # Two steps: after them, rounding alone moves the third gradient of these small models by 1e-4, on one rank as well.
    "gemma 3, values, tp 2, cp 2, sp": Arrangement(
        ranks=4, config=sizes(tp=2, cp=2, sp=True), model=MODELS["gemma3_text"], task="value", calls=(1, 1)
    ),
    "gpt-oss, ep 2, tp 2, cp 2, sp": Arrangement(
        ranks=4, config=sizes(ep=2, tp=2, cp=2, etp=1, sp=True), model=MODELS["gpt_oss"], calls=(1, 1)
    ),
    "olmo 2, tp 2, pp 2": Arrangement(ranks=4, config=sizes(tp=2, pp=2), model=MODELS["olmo2"]),
    "mixtral": Arrangement(ranks=1, model=MIXTRAL),
    "mistral, cp 2, window": Arrangement(ranks=2, model=MISTRAL, config=sizes(cp=2)),
    "dp 2": Arrangement(ranks=2),
    "pp 2, vpp 2, dp 2, overlapped": Arrangement(
        ranks=4, config=sizes(pp=2, vpp=2, overlap_grad_reduce=True), model=TIED | FOUR, calls=(1, 2, 1)
    ),
    "ep 2, pp 2, overlapped": Arrangement(
        ranks=4, config=sizes(ep=2, pp=2, overlap_grad_reduce=True), model=MIXTURE, calls=(1, 2, 1)
    ),
    "dp 2, tp 2, sp, tied, overlapped": Arrangement(
        ranks=4, config=sizes(tp=2, sp=True, overlap_grad_reduce=True, ddp_bucket_size=500), model=TIED
    ),
    "tp 2, tied": Arrangement(ranks=2, config=sizes(tp=2), model=TIED),
    "dp 2, tp 2": Arrangement(ranks=4, config=sizes(tp=2)),
    "tp 2, pp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, pp=2, sp=True)),
    "tp 2, cp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, cp=2, sp=True)),
    "pp 2, cp 2": Arrangement(ranks=4, config=sizes(pp=2, cp=2)),
    "tp 2, pp 2, cp 2, sp": Arrangement(ranks=8, config=sizes(tp=2, pp=2, cp=2, sp=True), model=TIED),
    "deepseek, tp 2, pp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, pp=2, sp=True), model=DEEPSEEK),
    "tp 2, sp, layers recomputed": Arrangement(ranks=2, config=sizes(tp=2, sp=True), checkpointing=True),
    "parts recomputed": Arrangement(
        ranks=1,
        config={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        checkpointing=True,
    ),
    "ep 2, allgather, fp64 routers": Arrangement(
        ranks=2, config=sizes(ep=2, moe_token_dispatcher_type="allgather", moe_router_dtype="fp64"), model=MIXTURE
    ),
    "ep 2, cp 2, allgather": Arrangement(
        ranks=4, config=sizes(ep=2, cp=2, moe_token_dispatcher_type="allgather"), model=MIXTURE
    ),
    "ep 2, tp 2, sp, allgather": Arrangement(
        ranks=4, config=sizes(ep=2, tp=2, etp=1, sp=True, moe_token_dispatcher_type="allgather"), model=MIXTURE
    ),
    "experts recomputed": Arrangement(
        ranks=2,
        model=MIXTURE,
        config=sizes(ep=2, moe_layer_recompute=True),
        checkpointing=True,
    ),
    "some layers recomputed": Arrangement(
        ranks=1,
        config={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        checkpointing=True,
    ),
    "pp 2, ends counted": Arrangement(
        ranks=2,
        config=sizes(pp=2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
    ),
    "pp 2, first stage set": Arrangement(
        ranks=2, config=sizes(pp=2, num_layers_in_first_pipeline_stage=3), model=QWEN3 | FOUR
    ),
    "pp 3, vpp 2, ends set": Arrangement(
        ranks=3,
        model=QWEN3 | EIGHT,
        config=sizes(pp=3, vpp=2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2),
    ),
    "pp 2, vpp 4": Arrangement(ranks=2, config=sizes(pp=2, vpp=4), model=QWEN3 | EIGHT),
    "pp 3, vpp 2": Arrangement(ranks=3, config=sizes(pp=3, vpp=2), model=QWEN3 | SIX),
    "pp 2, vpp 2, layers recomputed": Arrangement(
        ranks=2, config=sizes(pp=2, vpp=2), model=QWEN3 | FOUR, checkpointing=True
    ),
    "pp 2, vpp 2, ends counted": Arrangement(
        ranks=2,
        model=QWEN3 | SIX,
        config=sizes(
            pp=2, vpp=2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
        ),
    ),
    "pp 2, by layout": Arrangement(ranks=2, config=sizes(pp=2, layout="E t*3 | t L"), model=QWEN3 | FOUR),
    "pp 2, vpp 2, by layout, tied": Arrangement(ranks=2, config=sizes(pp=2, layout="E|tt|t|tL"), model=TIED | FOUR),
    "tp 2, pp 2, vpp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, pp=2, vpp=2, sp=True), model=QWEN3 | FOUR),
    "pp 2, vpp 2, cp 2": Arrangement(ranks=4, config=sizes(pp=2, vpp=2, cp=2), model=QWEN3 | FOUR),
    "pp 2, vpp 2, dp 2": Arrangement(ranks=4, config=sizes(pp=2, vpp=2), model=QWEN3 | FOUR),
    "ep 2, pp 2, vpp 2": Arrangement(ranks=4, config=sizes(ep=2, pp=2, vpp=2), model=MIXTURE | FOUR),
    "values, pp 2, tied": Arrangement(ranks=2, config=sizes(pp=2), model=TIED, task="value"),
    "values, tp 2, pp 2": Arrangement(ranks=4, config=sizes(tp=2, pp=2), model=TIED, task="value"),
    "scores, tp 2": Arrangement(ranks=2, config=sizes(tp=2), task="reward"),
    "scores, tp 2, cp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, cp=2, sp=True), task="reward"),
    "ep 4": Arrangement(ranks=4, config=sizes(ep=4), model=MIXTURE),
    "ep 2, dp 4": Arrangement(ranks=4, config=sizes(ep=2), model=MIXTURE),
    "ep 2, tp 2, sp": Arrangement(ranks=2, config=sizes(ep=2, tp=2, etp=1, sp=True), model=MIXTURE),
    "expert tp 2, sp": Arrangement(ranks=2, config=sizes(tp=2, sp=True), model=MIXTURE),
    "tp 2, sp, experts whole": Arrangement(ranks=2, config=sizes(tp=2, etp=1, sp=True), model=MIXTURE),
    "tp 1, expert tp 2": Arrangement(ranks=2, config=sizes(etp=2), model=MIXTURE),
    "tp 1, expert tp 2, allgather": Arrangement(
        ranks=2, config=sizes(etp=2, moe_token_dispatcher_type="allgather"), model=MIXTURE
    ),
    "tp 2, sp, experts whole, overlapped": Arrangement(
        ranks=2,
        config=sizes(tp=2, etp=1, sp=True, overlap_grad_reduce=True, ddp_bucket_size=500),
        model=MIXTURE,
        calls=(2, 1, 3),
    ),
    "cp 2, expert tp 2": Arrangement(ranks=2, config=sizes(cp=2, etp=2), model=MIXTURE),
    "ep 2, expert tp 2, sp": Arrangement(ranks=4, config=sizes(ep=2, tp=2, etp=2, sp=True), model=MIXTURE),
    "ep 2, tp 2, pp 2, sp": Arrangement(ranks=4, config=sizes(ep=2, tp=2, pp=2, etp=1, sp=True), model=MIXTURE),
    "ep 2, tp 2, cp 2, sp": Arrangement(ranks=4, config=sizes(ep=2, tp=2, cp=2, etp=1, sp=True), model=MIXTURE),
    "ep 2, pp 2": Arrangement(ranks=4, config=sizes(ep=2, pp=2), model=MIXTURE),
    "ep 2, cp 2": Arrangement(ranks=2, config=sizes(ep=2, cp=2), model=MIXTURE),
}
ARRANGEMENTS = [pytest.param(each, id=name) for name, each in QUICK.items()] + [
    pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in PRODUCTS.items()
]


@pytest.fixture
def run(host):
    def on_ranks(function, case, *arguments):
        ready = case.with_(master_port=free_port())
        return host.run(function, ready, *arguments, num_ranks=case.world_size, timeout_s=200)

    return on_ranks


def case_of(arrangement, folder):
    written = write_checkpoint(folder, arrangement.model, task=arrangement.task, vocab_size=VOCABULARY)
    _draw_biases(folder)
    model = replace(written, gradient_checkpointing=arrangement.checkpointing)
    return case_on(arrangement.ranks, arrangement.config, model)


def _draw_biases(folder):
    """By which experts are chosen: transformers begins with 0."""
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in biases:
        tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    if biases:
        save_file(tensors, file, metadata={"format": "pt"})


def steps(calls, task):
    """Of shares with different numbers of microbatches, and one for each number of calls."""
    split, loss = Split(max_sequences=3), OF_TASK[task]
    batches = [make_batch(VOCABULARY, seed=seed) for seed in range(len(calls))]
    return [Step(sequences=each, loss=loss, split=split, calls=of) for each, of in zip(batches, calls, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("config", [sizes(tp=2), sizes(tp=2, etp=1)], ids=["cut", "whole"])
def test_experts_score_without_sequence_parallel(run, tmp_path, config):
    """Where nothing is trained."""
    infer = registry().find(TrainProvider, "megatron_infer")
    case = case_of(Arrangement(ranks=2, model=MIXTURE, config=config), tmp_path).with_(provider=infer, training=None)
    batch = make_batch(VOCABULARY, seed=10)
    rows = run(score, case, batch, WANT, Split())[0]
    expected = Reference(TransformersModel(case.model), "causal_lm").by_sequence(batch, WANT)
    for name, bound in OUTPUTS.items():
        check_rows(name, rows[name], expected[name], bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVISIONS)
def test_megatron_divides_a_model_as_check_supposes(run, tmp_path, name):
    """What `check` says of the same: see `test_config.py`."""
    division = DIVISIONS[name]
    models = {"qwen3": QWEN3, "mixtral": MIXTRAL, "qwen3_moe": MIXTURE, "deepseek_v3": DEEPSEEK}
    recomputes = "recompute_granularity" in division.config
    case = case_of(
        Arrangement(
            ranks=division.ranks,
            model=models[division.model_type] | division.keys,
            config=division.config,
            checkpointing=recomputes,
        ),
        tmp_path,
    )
    (step,) = steps((1,), "causal_lm")
    assert run(train_unchecked, case, step) == (division.fits,) * division.ranks


def test_inputs_of_recomputed_layers_are_offloaded(run, tmp_path):
    case = case_of(Arrangement(ranks=1, model=QWEN3 | SIX, checkpointing=True), tmp_path)
    (step,) = steps((1,), "causal_lm")
    ((copied, kept, moved),) = run(offloaded, case, step)
    check_same("weights after a step", moved, kept)
    for micro in pack(step.sequences, max_sequences=step.split.max_sequences):
        assert copied.count(len(micro.tokens_T) * QWEN3["hidden_size"] * 4) >= SIX["num_hidden_layers"]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangement_computes_and_learns_as_transformers(run, tmp_path, arrangement):
    check_against_transformers(run, tmp_path, arrangement)


def check_against_transformers(run, tmp_path, arrangement):
    # Of this seed, no sequence begins with token 0, whose row of the embedding is 0: any token might follow it best.
    case, batch = case_of(arrangement, tmp_path), make_batch(VOCABULARY, seed=10)
    task = arrangement.task
    want, bounds = (WANT, OUTPUTS) if task == "causal_lm" else (WantedOutputs(values=True), {"values": 1e-4})
    answers = run(score_and_train, case, batch, steps(arrangement.calls, task), want)
    reference = Reference(TransformersModel(case.model), task)
    start, expected = reference.weights(), reference.by_sequence(batch, want)
    leaders = [each for each in answers if each["place"].leader]
    check_same("weights as they were loaded", leaders[0]["before"], start)
    for name, bound in bounds.items():
        found = {key: row for each in leaders for key, row in each["scored"][name].items()}
        check_rows(name, found, expected[name], bound)
    for at, right in enumerate(reference.train(TRAINING, steps(arrangement.calls, task))):
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(right.loss, rel=1e-4)
        for each in answers:
            assert each["stats"][at].grad_norm == pytest.approx(right.grad_norm, rel=1e-4)
            assert each["stats"][at].learning_rate == pytest.approx(right.learning_rate)
    went = {name: leaders[0]["weights"][name] - each for name, each in start.items()}
    should = {name: each - start[name] for name, each in reference.weights().items()}
    check_near("the way that the weights went", went, should, 1e-4)
    for each in leaders[1:]:
        check_same("weights of another replica", each["weights"], leaders[0]["weights"])
