"""A mixture of experts that is told which experts to use: against transformers' own code with its top-k replaced."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import pack
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.train import WantedOutputs
from roll_modeling.model import load_model
from roll_modeling.routing import ROUTERS, RoutingRecorder, check_routers
from roll_testing.errors import raises_error

EXPERTS, TOP_K, LAYERS, VOCABULARY = 6, 2, 2, 61
WANT = WantedOutputs(logprobs=True)


def mixture(model_type, **given):
    """A small one; values are drawn widely, so that routing matters."""
    config = {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if model_type not in ("mixtral", "olmoe"):
        config["moe_intermediate_size"] = 24
    if model_type == "deepseek_v3":
        config |= {
            "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
        }  # fmt: skip
    elif model_type == "glm4_moe":
        config |= {
            "head_dim": 8, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        }  # fmt: skip
    elif model_type == "mixtral":
        config |= {"num_local_experts": EXPERTS, "head_dim": 8}
    elif model_type != "olmoe":
        config |= {"num_experts": EXPERTS, "head_dim": 8, "norm_topk_prob": model_type == "qwen3_moe"}
        if model_type == "qwen2_moe":
            config |= {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}
    else:
        config |= {"num_experts": EXPERTS}
    return config | given


def experts_for(sequences, seed=0):
    """Random ones for every token but the last of each sequence, as an engine returns them."""
    rng = np.random.default_rng(seed)
    order = lambda size: np.argsort(rng.random((size, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]  # noqa: E731
    return [replace(each, routed_experts=order(len(each) - 1).astype(np.uint8)) for each in sequences]


def plain(strategy):
    """The same weights in a model that nobody has touched."""
    model = load_model(replace(strategy.spec, attn_implementation="auto"), device="cpu")
    for name, each in model.named_parameters():
        assert torch.equal(each, strategy.model.get_parameter(name))
    return model


def forced_logprobs(model, sequence, monkeypatch):
    """By transformers' own code, whose `torch.topk` is told what to find; its last token keeps its own experts."""
    usual, calls = torch.topk, iter(range(LAYERS))

    def topk(scores, k, *given, **named):
        found = usual(scores, k, *given, **named)
        if k != TOP_K:  # of groups of experts
            return found
        layer = next(calls)
        indices = found[1].clone()
        indices[:-1] = torch.from_numpy(sequence.routed_experts[:, layer].astype(np.int64))
        return scores.gather(1, indices), indices

    with monkeypatch.context() as patched:
        patched.setattr(torch, "topk", topk)
        logits = model(input_ids=torch.from_numpy(sequence.tokens)[None], use_cache=False).logits[0]
    rows = logits[:-1].float().log_softmax(-1)
    return rows.gather(1, torch.from_numpy(sequence.tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    ("model_type", "attention"), [*((each, "auto") for each in sorted(ROUTERS)), ("qwen3_moe", "eager")]
)
def test_replay_is_transformers_own_code_with_other_indices(build, sequences, monkeypatch, model_type, attention):
    given = experts_for(sequences)
    strategy = build(random_init=mixture(model_type), router_replay=True, attn_implementation=attention)
    assert strategy.task_model.backbone.flat is (attention == "auto") or model_type == "deepseek_v3"
    (micro,) = pack(given)
    logprobs_T = strategy.forward(micro, WANT).logprobs_T
    plain_T = strategy.forward(replace(micro, routed_experts_TMK=None), WANT).logprobs_T
    assert (logprobs_T - plain_T).abs().max() > 0.05  # other experts say other things
    model, start = plain(strategy), 0
    for each in given:
        if len(each) > 1:
            with torch.no_grad():
                expected = forced_logprobs(model, each, monkeypatch)
            torch.testing.assert_close(logprobs_T[start + 1 : start + len(each)], expected, rtol=0, atol=2e-5)
        start += len(each)


def gradients(strategy, micro):
    loss = policy_objective(policy_loss="roll_core.algorithms.policy_losses:vanilla", entropy_metric=False)
    micro = replace(micro, advantages_T=torch.ones(micro.num_tokens))
    strategy.optimizer.flat_grad.zero_()
    metrics = strategy.forward_backward([micro], loss)
    return metrics[0], {name: each.grad.clone() for name, each in strategy.model.named_parameters()}


def test_the_gradient_goes_through_the_routers_logits(build, sequences, monkeypatch):
    given = [each for each in experts_for(sequences) if each.loss_mask.any()]
    strategy = build(random_init=mixture("qwen3_moe"), router_replay=True)
    (micro,) = pack(given)
    _, found = gradients(strategy, micro)
    model = plain(strategy).requires_grad_(True)
    per_sequence = [
        -forced_logprobs(model, each, monkeypatch)[torch.from_numpy(each.loss_mask[1:])].mean() for each in given
    ]
    torch.stack(per_sequence).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert found["model.layers.0.mlp.gate.weight"].abs().max() > 1e-3


def test_layers_that_are_computed_again_go_to_the_same_experts(build, sequences):
    (micro,) = pack([each for each in experts_for(sequences) if each.loss_mask.any()])
    found = {}
    for again in (False, True):
        strategy = build(random_init=mixture("qwen3_moe"), router_replay=True, gradient_checkpointing=again)
        found[again] = gradients(strategy, micro)
    assert found[True][0] == found[False][0]
    for name, each in found[True][1].items():
        torch.testing.assert_close(each, found[False][1][name], rtol=1e-5, atol=1e-7, msg=name)


def own_choices(strategy, sequences):
    """Recorded from a model of the same weights, one sequence at a time."""
    model = plain(strategy)
    recorder = RoutingRecorder(model)
    found = []
    for each in sequences:
        with torch.no_grad():
            model(input_ids=torch.from_numpy(each.tokens)[None], use_cache=False)
        found.append(replace(each, routed_experts=recorder.take()[:-1]))
    return found


def test_replaying_own_choices_changes_nothing(build, sequences):
    strategy = build(random_init=mixture("qwen3_moe"), router_replay=True)
    (micro,) = pack(own_choices(strategy, sequences))
    replayed = strategy.forward(micro, WANT)
    plain = strategy.forward(replace(micro, routed_experts_TMK=None), WANT)
    torch.testing.assert_close(replayed.logprobs_T, plain.logprobs_T, rtol=0, atol=1e-6)
    assert not replayed.routing_disagreement_T.any()
    assert plain.routing_disagreement_T is None


@pytest.mark.parametrize("attention", ["auto", "eager"], ids=["flat", "padded"])
def test_disagreement_is_the_share_of_experts_not_chosen(build, sequences, attention):
    strategy = build(random_init=mixture("qwen3_moe"), router_replay=True, attn_implementation=attention)
    chosen = own_choices(strategy, sequences)
    # In the last layer, so that nothing after it is moved: one of two experts of the first token of sequence 2.
    experts = chosen[2].routed_experts.copy()
    taken = set(experts[0, -1].tolist())
    experts[0, -1, 0] = next(each for each in range(EXPERTS) if each not in taken)
    chosen[2] = replace(chosen[2], routed_experts=experts)
    (micro,) = pack(chosen)
    found_T = strategy.forward(micro, WANT).routing_disagreement_T
    at = len(chosen[0]) + len(chosen[1]) + 1  # the token that is drawn from that state
    assert found_T[at] == pytest.approx(1 / (LAYERS * TOP_K))
    assert found_T.sum() == found_T[at]


def test_the_objective_reports_the_mean_over_trained_tokens(build, sequences):
    given = [each for each in experts_for(sequences) if each.loss_mask.any()]
    strategy = build(random_init=mixture("qwen3_moe"), router_replay=True)
    (micro,) = pack(given)
    per_token_T = strategy.forward(micro, WANT).routing_disagreement_T
    metrics, _ = gradients(strategy, micro)
    assert metrics["routing_disagreement"] == pytest.approx(float(per_token_T[micro.loss_mask_T].mean()), rel=1e-5)
    assert 0.3 < metrics["routing_disagreement"] < 1


def test_bf16_replay_matches_logprobs_of_another_precision(build, sequences):
    """What this is for: the rounding of bf16 makes routers choose otherwise."""
    exact = build(random_init=mixture("qwen3_moe", num_hidden_layers=LAYERS), router_replay=True)
    (micro,) = pack(own_choices(exact, sequences))
    expected_T = exact.forward(replace(micro, routed_experts_TMK=None), WANT).logprobs_T
    coarse = build(random_init=mixture("qwen3_moe"), router_replay=True, dtype="bf16")
    with torch.no_grad():
        for name, each in coarse.model.named_parameters():
            each.copy_(exact.model.get_parameter(name))
            if name.endswith("gate.weight"):  # as after some steps that the engine has not seen
                each.add_(0.2 * torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each.dtype))
    replayed = coarse.forward(micro, WANT)
    plain_T = coarse.forward(replace(micro, routed_experts_TMK=None), WANT).logprobs_T
    assert replayed.routing_disagreement_T.max() > 0
    with_it, without = ((each - expected_T).abs().mean() for each in (replayed.logprobs_T, plain_T))
    assert with_it < 0.7 * without


def test_packing_leaves_unknown_tokens_to_the_router(sequences):
    experts = np.arange(3 * LAYERS * TOP_K, dtype=np.uint8).reshape(3, LAYERS, TOP_K)
    first = replace(sequences[0], routed_experts=experts)  # of its 5 tokens, 3
    (micro,) = pack([first, sequences[1]])
    routed = micro.routed_experts_TMK
    assert routed.dtype == torch.int16
    assert routed.shape == (6, LAYERS, TOP_K)
    assert np.array_equal(routed[:3], experts)
    assert (routed[3:] == -1).all()
    assert pack([sequences[0]])[0].routed_experts_TMK is None
    with raises_error(DataError, "5"):
        pack([replace(sequences[0], routed_experts=np.zeros((6, LAYERS, TOP_K), np.uint8))])
    with raises_error(DataError, "{(3, 2), (2, 2)}"):
        pack([first, replace(sequences[2], routed_experts=np.zeros((2, LAYERS + 1, TOP_K), np.uint8))])


def test_unsupported_replay_is_refused_by_name(build, tiny):
    with raises_error(UnsupportedError, "qwen3"):
        build(random_init=tiny, router_replay=True)
    with raises_error(ValueError, "gpt_oss"):
        check_routers({"model_type": "gpt_oss", "num_local_experts": 8}, "router_replay")
    check_routers({}, "router_replay")  # nothing is known yet


@pytest.mark.parametrize(
    ("shape", "number", "facts"),
    [
        ((4, LAYERS + 1, TOP_K), 0, ("3", "2")),
        ((4, LAYERS, 1), 0, ("1", "2")),
        ((4, LAYERS, TOP_K), EXPERTS, ("6",)),
    ],
)
def test_experts_of_another_model_are_refused(build, sequences, shape, number, facts):
    strategy = build(random_init=mixture("qwen3_moe"), router_replay=True)
    (micro,) = pack([replace(sequences[0], routed_experts=np.full(shape, number, np.uint8))])
    with raises_error(DataError, *facts):
        strategy.forward(micro, WANT)


def test_model_not_built_to_replay_raises(build, sequences):
    strategy = build(random_init=mixture("qwen3_moe"))
    (micro,) = pack(experts_for(sequences))
    with raises_error(UnsupportedError, "router_replay"):
        strategy.forward(micro, WANT)
