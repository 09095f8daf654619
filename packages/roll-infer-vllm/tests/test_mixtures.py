"""Mixtures of experts: what is published is what vLLM computes with, and every fault shows in the proof."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_live import CACHE, start
from vllm_mixtures import (
    BF16,
    MODELS,
    OTHERS,
    PROMPT,
    InProcess,
    check_faults,
    expected_logprobs,
    expert_map,
    mixture,
    remote_functions,
)

from roll_core.errors import CorruptTensorError, MissingTensorError
from roll_core.runtime.weights.publisher import verify
from roll_core.spec.model import LoraSpec
from roll_modeling.engine_experts import ExpertLayout, ExpertName
from roll_modeling.engine_weights import ExpertsTensor
from roll_modeling.lora import add_adapters
from roll_modeling.model import load_model
from roll_modeling.portable_state import router_buffers
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted
from shared_tests.live_engine import request
from shared_tests.loaded_engine import CLOSE, digests

pytestmark = pytest.mark.engine("vllm")
CLOSE_BF16 = 0.1
"""vLLM and transformers round differently. Their routers may choose other experts, so only most tokens are close."""
QUICK = ("deepseek_v3",)
"""Architectures that every run of tests starts; beside `qwen3_moe`, `glm4_moe` and `gpt_oss` below."""
ALL = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS if kind != "gpt_oss"]


@pytest.mark.parametrize("kind", ALL)
def test_published_experts_are_read_back_and_computed_with(kind):
    engine = InProcess(kind)
    try:
        check_published(engine, kind in BF16)
    finally:
        engine.close()


def check_published(engine, in_bf16=False):
    """Twice, new weights are read back and computed with."""
    for _ in range(2):
        engine.move()
        manifest, receipt = engine.publish()
        assert dict(receipt.digests) == digests(manifest)
        check_tokens(engine.trainer, *engine.generate(), in_bf16)


def check_tokens(trainer, tokens, logprobs, in_bf16=False):
    """They are the trainer's greedy tokens with its logprobs."""
    rows = expected_logprobs(trainer, tokens)
    expected = rows[torch.arange(len(tokens)), torch.as_tensor(tokens)].numpy()
    if in_bf16:
        assert np.median(np.abs(logprobs - expected)) < CLOSE_BF16
        return
    np.testing.assert_allclose(logprobs, expected, atol=CLOSE)
    np.testing.assert_allclose(expected, rows.max(dim=-1).values.numpy(), atol=CLOSE)


# -- faults ------------------------------------------------------------------------------------------------------------

LAYER = "model.layers.1.mlp"
FUSED = f"{LAYER}.experts.gate_up_proj"
BIAS = f"{LAYER}.gate.e_score_correction_bias"


WHILE_LOADING = {
    "an expert dropped": lambda parts: [each for each in parts if each[0] != 3],
    "two experts swapped": lambda parts: [({1: 2, 2: 1}.get(each[0], each[0]), *each[1:]) for each in parts],
    "gate and up swapped": lambda parts: [(expert, None if part is None else 1 - part, m) for expert, part, m in parts],
    "one bit flipped": lambda parts: [(*each[:2], flipped(each[2], each[0])) for each in parts],
}
"""What happens to the matrices of a layer's experts: expert, gate or up, and matrix."""


def check_fault(engine, monkeypatch, fault, name):
    """It shows in the digest of the tensor `name`, and the next update repairs it."""
    split = ExpertLayout.split
    with monkeypatch.context() as patch:
        patch.setattr(ExpertLayout, "split", lambda *args: iter(WHILE_LOADING[fault](list(split(*args)))))
        engine.move()
        with raises_error(CorruptTensorError, name):
            verify(*engine.publish())
    verify(*engine.publish())


class TestFaults:
    """A mixture with correction biases, a shared expert and a dense layer."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls):
        engine = InProcess("glm4_moe")
        yield engine
        engine.close()

    def test_without_a_fault_the_proof_holds(self, engine):
        engine.move()
        manifest, receipt = engine.publish()
        verify(manifest, receipt)
        assert {FUSED, BIAS, f"{LAYER}.shared_experts.up_proj.weight"} <= set(receipt.digests)
        check_tokens(engine.trainer, *engine.generate())

    @pytest.mark.parametrize("fault", WHILE_LOADING)
    def test_a_fault_while_loading_is_found(self, engine, monkeypatch, fault):
        check_fault(engine, monkeypatch, fault, FUSED)

    def test_a_tensor_of_one_expert_alone_is_published_too(self, engine):
        """As transformers' files and other trainers name them."""
        engine.move()
        tensors = [(name, each) for name, each in engine.trainer.named_parameters() if name != FUSED]
        for expert, gate_up in enumerate(engine.trainer.get_parameter(FUSED)):
            for part, half in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                tensors.append((f"{LAYER}.experts.{expert}.{part}_proj.weight", half))
        biased = [*tensors, (BIAS, engine.trainer.get_buffer(BIAS))]
        verify(*engine.publish(biased))
        check_tokens(engine.trainer, *engine.generate())
        with raises_error(MissingTensorError, "w13_weight"):
            engine.publish([each for each in biased if not each[0].endswith("experts.6.up_proj.weight")])

    def test_a_correction_bias_that_is_missing_is_found(self, engine):
        engine.move()
        with raises_error(MissingTensorError, BIAS):
            engine.publish(list(engine.trainer.named_parameters()))
        manifest, receipt = engine.publish()
        verify(manifest, receipt)
        with torch.no_grad():
            engine.model.get_parameter(BIAS).zero_()
        with raises_error(CorruptTensorError, BIAS):
            verify(manifest, engine.receipt(manifest))

    @pytest.mark.parametrize("matrix", ["w13_weight", "w2_weight"])
    def test_every_element_of_the_packed_experts_counts(self, engine, matrix):
        engine.move()
        manifest, receipt = engine.publish()
        verify(manifest, receipt)
        packed = engine.model.get_parameter(f"{LAYER}.experts.routed_experts.{matrix}").detach()
        sizes = {"w13_weight": 2 * 48 * 64, "w2_weight": 64 * 48}
        expert = packed[4].view(-1)
        places = expert.nonzero().flatten()
        assert len(places) == sizes[matrix]  # others are padding
        for place in places[:: len(places) // 7].tolist():
            before = expert[place].clone()
            expert[place] = torch.nextafter(before, before + 1)
            with raises_error(CorruptTensorError, f"{LAYER}.experts."):
                verify(manifest, engine.receipt(manifest))
            expert[place] = before
        verify(manifest, engine.receipt(manifest))

    def test_vllm_still_leaves_experts_unpacked(self, engine, monkeypatch):
        """When this fails, `workarounds.pack_experts_again` is no longer needed. The update or the receipt tells."""
        monkeypatch.setattr("roll_infer_vllm.transfer.pack_experts_again", lambda model: None)
        engine.move()
        with pytest.raises(Exception, match=r"experts|size"):
            verify(*engine.publish())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_faults_of_further_architectures_are_found(kind, monkeypatch):
    engine = InProcess(kind)
    try:
        verify(*engine.publish())
        names = [name for name, _ in engine.trainer.named_parameters() if name.endswith("experts.gate_up_proj")]
        for fault in WHILE_LOADING:
            check_fault(engine, monkeypatch, fault, names[0])
        tensors = [*engine.trainer.named_parameters(), *router_buffers(engine.trainer)]
        for bias in [name for name, _ in tensors if name.endswith(("correction_bias", "expert_bias"))]:
            with pytest.raises(MissingTensorError):
                engine.publish([each for each in tensors if each[0] != bias])
    finally:
        engine.close()


@pytest.mark.slow
def test_packed_convolutions_are_read_back():
    """In bf16 vLLM packs the convolutions of linear attention for some processors, and computes with a copy as well."""
    engine = InProcess("qwen3_next")
    name = "model.layers.0.linear_attn.conv1d.weight"
    try:
        engine.move()
        manifest, receipt = engine.publish()
        verify(manifest, receipt)
        convolution = engine.model.get_submodule(name.removesuffix(".weight"))
        copies = [convolution.weight.data, getattr(convolution, "_cpu_unpacked_conv_weight", None)]
        for stored in copies if copies[1] is not None else copies[:1]:
            element = stored.view(-1)[77:78]
            before = element.clone()
            element.mul_(2)
            with raises_error(CorruptTensorError, name):
                verify(manifest, engine.receipt(manifest))
            element.copy_(before)
        verify(manifest, engine.receipt(manifest))
    finally:
        engine.close()


def flipped(tensor, expert):
    """The tensor with another lowest bit in one element, of one expert."""
    changed = tensor.clone()
    if expert == 3:
        changed.view(torch.int32)[5, 9] ^= 1
    return changed


class TestSinks:
    """gpt-oss: interleaved experts with biases, and attention sinks."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls):
        engine = InProcess("gpt_oss")
        yield engine
        engine.close()

    def test_published_experts_and_sinks_are_computed_with(self, engine):
        check_published(engine)

    def test_vllm_still_leaves_attention_sinks_as_they_were(self, engine, monkeypatch):
        """When this fails, `workarounds.load_sinks` is no longer needed. The receipt tells, as it must."""

        def load_as_vllm_does(at, sinks):
            (name,) = (name for name in names if engine.model.get_submodule(name.removesuffix(".sinks")) is at.module)
            engine.model.load_weights([(name, sinks)])

        names = [name for name, _ in engine.model.named_parameters() if name.endswith(".sinks")]
        monkeypatch.setattr("roll_infer_vllm.transfer.load_sinks", load_as_vllm_does)
        engine.move()
        manifest, receipt = engine.publish()
        wrong = [name for name, each in digests(manifest).items() if receipt.digests[name] != each]
        assert wrong == [f"model.layers.{layer}.self_attn.sinks" for layer in range(2)]


def test_vllm_still_routes_without_correction_biases_on_a_cpu():
    """When this fails, `workarounds.route_with_correction_biases` is no longer needed."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from roll_infer_vllm.workarounds import route_with_correction_biases

    route_with_correction_biases()
    router = SimpleNamespace(
        use_grouped_topk=False,
        scoring_func="softmax",
        custom_routing_function=None,
        top_k=1,
        renormalize=True,
        routed_scaling_factor=1.0,
        e_score_correction_bias=torch.tensor([0.0, 0.0, 1.0]),
    )
    logits = torch.tensor([[0.5, 0.1, 0.2]])
    _, mended = CPURouter._compute_routing(router, None, logits, None)
    _, plain = CPURouter._compute_routing.__wrapped__(router, None, logits, None)
    assert (mended.tolist(), plain.tolist()) == ([[2]], [[0]])


# -- a whole engine ----------------------------------------------------------------------------------------------------


def test_engine_of_experts_updates_sleeps_and_merges_adapters():
    live = start(mixture("qwen3_moe"), CACHE)
    try:
        live.step()
        verify(*live.publish())
        output = until_interrupted(lambda: live.run(through_a_publish(live)), lambda each: len(set(each.versions)) < 2)
        assert len(set(output.versions)) == 2
        live.run(live.strategy.sleep())
        live.run(live.strategy.wake())
        live.step()
        verify(*live.publish())
        check_live(live)
        merged = merged_adapters(live)
        verify(*live.publish(list(merged.items())))
        with torch.no_grad():
            for name, each in merged.items():
                live.model.get_parameter(name).copy_(each)
        check_live(live)
    finally:
        live.close()


async def through_a_publish(live):
    asking = asyncio.create_task(live.strategy.generate(request("long", PROMPT, max_new_tokens=200)))
    await asyncio.sleep(0.3)
    await live.update()
    return (await asking).outputs[0]


def check_live(live):
    output = live.generate(f"version {live.version}", PROMPT, temperature=0, max_new_tokens=12).outputs[0]
    check_tokens(live.model, output.token_ids.tolist(), output.logprobs, live.spec.dtype == "bf16")


def merged_adapters(live):
    """The trainer's weights with adapters on its attention, merged as a train strategy does."""
    spec = replace(live.spec, lora=LoraSpec(targets=("q_proj", "o_proj"), rank=4, alpha=8.0))
    model = load_model(spec)
    model.load_state_dict(live.model.state_dict(), strict=False)
    adapters = add_adapters(model, spec)
    with torch.no_grad():
        for each in adapters.trained().values():
            each.normal_()
    return {name: each.clone() for name, each in adapters.merged()}


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_share_every_expert(kind):
    live = start(mixture(kind), {**CACHE, "tensor_parallel_size": 2})
    try:
        for _ in range(2):
            live.step()
            verify(*live.publish())
            check_live(live)
    finally:
        live.close()


EXPERT_PARALLEL = {**CACHE, "tensor_parallel_size": 2, "enable_expert_parallel": True}


def test_vllm_still_computes_experts_of_other_ranks_on_a_cpu():
    """When this fails, `workarounds.skip_experts_of_other_ranks` is no longer needed."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = inspect.unwrap(CPUUnquantizedExperts.apply)
    assert "expert_map" not in inspect.getsource(apply).partition(") -> None:")[2]


PLACEMENTS = {
    "linear": ("qwen3_moe", [[0, 1, 2, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 0, 1, 2, 3]]),
    "round_robin": ("glm4_moe", [[0, -1, 1, -1, 2, -1, 3, -1], [-1, 0, -1, 1, -1, 2, -1, 3]]),
}
"""An architecture and its expert maps by `expert_placement_strategy`. vLLM uses `round_robin` only with groups of
experts."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_faults_of_a_rank_are_found_in_further_architectures(monkeypatch, kind):
    on_ranks = remote_functions(monkeypatch)
    live = start(mixture(kind), EXPERT_PARALLEL)
    try:
        live.step()
        verify(*live.publish())
        check_live(live)
        check_faults(live, on_ranks)
    finally:
        live.close()


@pytest.mark.parametrize("placement", ["linear", pytest.param("round_robin", marks=pytest.mark.slow)])
def test_faults_of_one_of_two_ranks_are_found(monkeypatch, placement):
    kind, maps = PLACEMENTS[placement]
    on_ranks = remote_functions(monkeypatch)
    live = start(mixture(kind), {**EXPERT_PARALLEL, "expert_placement_strategy": placement})
    try:
        assert on_ranks(live, expert_map) == maps
        live.step()
        verify(*live.publish())
        check_live(live)
        check_faults(live, on_ranks)
    finally:
        live.close()


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_reading_biases_of_another_rank_changes_none_of_this_one(monkeypatch, matrix):
    """A broadcast writes into its argument on all ranks but the sender."""
    from roll_infer_vllm import experts

    class Group:
        rank_in_group = 1

        def all_gather(self, places, dim):
            return torch.tensor([0, -1])  # expert 0 is the first rank's

        def broadcast(self, tensor, src):
            assert src == 0
            return tensor.fill_(7)

    monkeypatch.setattr(experts, "get_ep_group", Group)
    stored = torch.ones(1, 8)
    kernel = SimpleNamespace(w1_bias=stored, w2_bias=stored)
    routed = SimpleNamespace(
        use_ep=True,
        expert_map=torch.tensor([-1, 0]),
        moe_config=SimpleNamespace(hidden_dim_unpadded=8, intermediate_size_per_partition_unpadded=4),
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel)),
    )
    located = ExpertsTensor(
        module=routed,
        parameter=f"{matrix}_bias",
        name=ExpertName(path="experts", matrix=matrix, parameter="bias"),
        layout=ExpertLayout(num_experts=2, hidden=8, intermediate=4, interleaved=True),
    )
    (read,) = experts.shards(located, 0)
    assert read.tolist() == [7] * 8
    assert stored.tolist() == [[1] * 8]


def test_vllm_still_needs_names_of_weight_loaders():
    from vllm.model_executor.model_loader.reload.layerwise import _wrap_parameters_weight_loader

    from roll_infer_vllm.workarounds import name_partial_loaders

    layer = torch.nn.Linear(2, 2)
    layer.weight.weight_loader = partial(print)
    with pytest.raises(AttributeError):
        _wrap_parameters_weight_loader(layer)
    name_partial_loaders(layer)
    assert layer.weight.weight_loader.__name__ == "print"
