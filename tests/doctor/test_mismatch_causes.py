"""Causes planted into trainer or engine, from outside: the doctor names each first.

Patches stand in for faults of an engine's code; the doctor has no switch for them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from roll_core.cli.main import main
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_core.types import SamplingParams
from roll_infer_hf.decoder import Decoder
from roll_infer_hf.engine import HFInferStrategy
from roll_infer_hf.loaded_weights import LoadedWeights
from roll_infer_hf.sampler import Sampler
from roll_modeling.activations import recorded
from roll_modeling.model import load_model
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import TaskModel
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.runs import REWARDS, Runs
from roll_tools.mismatch_experiments import Pair, Part, Trainer
from roll_tools.mismatch_reference import ScoredTokens

VOCABULARY = 64
SHAPES = {"llama": {"model_type": "llama"}, "qwen3": {}}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Spec of a tiny model by architecture."""
    folder = tmp_path_factory.mktemp("mismatch")
    extra = {"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    return {
        name: write_checkpoint(folder / name, {**QWEN3, **extra, **keys}, task="causal_lm", vocab_size=VOCABULARY)
        for name, keys in SHAPES.items()
    }


@pytest.fixture
def pair(models) -> Callable[..., Pair]:
    """Makes a pair of trainer and engine, with changes of the engine's model or of the sampling."""
    registry = load_registry()
    rng = np.random.default_rng(0)
    common = rng.integers(3, 60, 34)
    prompts = [rng.integers(3, 60, length) for length in (5, 9, 14, 30)]
    prompts += [np.append(common, rng.integers(3, 60, 4)) for _ in range(2)]

    def make(
        *,
        engine: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        trained_by: str = "hf_train",
        model: str = "qwen3",
        **params: Any,
    ) -> Pair:
        spec = models[model]
        return Pair(
            trainer=Part(
                provider=registry.find(TrainProvider, trained_by),
                config={},
                model=replace(spec, **(trainer or {})),
                key="actor_train",
            ),
            engine=Part(
                provider=registry.find(InferProvider, "hf_infer"),
                config={"kernels": "torch", **(config or {})},
                model=replace(spec, **(engine or {})),
                key="actor_infer",
            ),
            params=SamplingParams(**{"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, **params}),
            prompts=prompts,
        )

    return make


def first(diagnosis) -> str:
    return diagnosis.causes[0].name if diagnosis.causes else ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_equal_sides_have_no_cause(pair, dtype):
    diagnosis = pair(engine={"dtype": dtype}, trainer={"dtype": dtype}).diagnose()
    assert diagnosis.gap <= diagnosis.noise
    assert not diagnosis.causes


# -- plants ------------------------------------------------------------------------------------------------------------
# A plant takes monkeypatch and changes code of one side; it may return keywords of `pair`.


def before_generate(change):
    """The engine sees another request."""

    def plant(patch):
        generate = HFInferStrategy.generate
        patch.setattr(HFInferStrategy, "generate", lambda self, request: generate(self, change(request)))

    return plant


def prompt_of(change):
    return before_generate(
        lambda request: replace(request, prompt_ids=np.asarray(change(request.prompt_ids), np.int64))
    )


def temperature_of(value):
    def change(request):
        return (
            request if request.prompt_logprobs else replace(request, params=replace(request.params, temperature=value))
        )

    return before_generate(change)


def sampled_logprobs(change, *, needs_shaped=False):
    """The engine computes logprobs of the sampled tokens by `change(scaled logits)`."""

    def plant(patch):
        sample = Sampler.sample

        def faulty(self, logits):
            scaled = logits.clone() if self._temperature_N1 is None else logits / self._temperature_N1
            tokens, plain = sample(self, logits)
            if needs_shaped and self._shaped is None:
                return tokens, plain
            return tokens, change(scaled).gather(1, tokens[:, None])[:, 0].float()

        patch.setattr(Sampler, "sample", faulty)

    return plant


def nucleus(scaled, top_p=0.8):
    ordered = scaled.sort(descending=True)
    mass = ordered.values.softmax(-1)
    out = mass.cumsum(-1) - mass >= top_p
    return scaled.masked_fill(torch.zeros_like(out).scatter(1, ordered.indices, out), -torch.inf).log_softmax(-1)


def top_five(scaled):
    return scaled.masked_fill(scaled < scaled.topk(5).values[:, -1:], -torch.inf).log_softmax(-1)


def around(owner, name, change):
    """`change(original, self, *arguments)` instead of a method."""

    def plant(patch):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args, **named: change(original, self, *args, **named))

    return plant


def low(tensor, dtype=torch.bfloat16):
    return tensor.to(dtype).to(tensor.dtype)


def bf16_head(original, self, hidden, *, record=True):
    normed = self._norm(hidden, self._final_norm)
    logits = F.linear(normed.bfloat16(), self._model.lm_head.weight.detach().bfloat16()).float()
    if record:
        self._record("model", norm=normed)
        self._record("", lm_head=logits)
    return logits


def kv_rounded(dtype):
    def change(original, self, layer, hidden, cos, sin):
        qk, value = original(self, layer, hidden, cos, sin)
        qk[:, self.num_heads :] = low(qk[:, self.num_heads :], dtype)
        return qk, low(value, dtype)

    return around(Decoder, "_project", change)


def rope_tables(change):
    def extended(original, self, num):
        known = len(self._cos)
        original(self, num)
        if len(self._cos) != known:
            self._cos, self._sin = change(self, self._cos, self._sin)

    return around(Decoder, "_need_positions", extended)


def with_inv_freq(change):
    def extended(original, self, num):
        module = self._model.model.rotary_emb
        if not getattr(module, "planted", False):
            module.planted, module.inv_freq = True, change(module.inv_freq)
        original(self, num)

    return around(Decoder, "_need_positions", extended)


def attention_scale(factor):
    def started(original, self, *args, **named):
        original(self, *args, **named)
        self.scale *= factor

    return around(Decoder, "__init__", started)


def norm_epsilon(value):
    def refreshed(original, self):
        original(self)
        self._epsilon = torch.full_like(self._epsilon, value)

    return around(Decoder, "refresh", refreshed)


def tied_head(original, self):
    original(self)
    self._head = lambda hidden: F.linear(hidden, self._embedding)


def frozen_head(original, self):
    """The head keeps a copy from before the update."""
    kept = getattr(self, "_planted_head", None)
    original(self)
    if kept is None:
        weight = self._model.lm_head.weight.detach().clone()
        kept = self._planted_head = lambda hidden: F.linear(hidden, weight)
    self._head = kept


def after_update(change):
    def replaced(original, self, manifest, incoming, *, shared):
        digests = original(self, manifest, incoming, shared=shared)
        change(self._loaded)
        return digests

    return around(LoadedWeights, "replace", replaced)


def nudged(loaded):
    loaded["model.layers.1.mlp.down_proj.weight"].data += 0.05


def transposed(loaded):
    weight = loaded["model.layers.0.self_attn.o_proj.weight"]
    weight.data = weight.data.T.clone()


def halves(loaded):
    for weight in loaded.values():
        weight.data = low(weight.data, torch.float16)


def skipped(original, self, manifest, incoming, *, shared):
    before = self._loaded["model.layers.0.mlp.up_proj.weight"].data.clone()
    digests = original(self, manifest, incoming, shared=shared)
    self._loaded["model.layers.0.mlp.up_proj.weight"].data.copy_(before)
    return digests


def donated(original, self, index, chunks, bounds, qk, value):
    """Keys taken from another prompt are doubled."""
    found = original(self, index, chunks, bounds, qk, value)
    for chunk in chunks:
        if chunk.prompt.donor is not None and chunk.begin == chunk.prompt.donated:
            chunk.prompt.cache.values[index][chunk.prompt.slot, :, : chunk.begin] *= 1.5
    return found


def in_batches(original, self, tokens):
    logits = original(self, tokens)
    return logits * 1.3 if len(tokens) > 2 else logits


def in_chunks(original, self, layer, hidden, attended):
    if getattr(self, "_later_chunk", False):
        attended = attended * 1.5
    return original(self, layer, hidden, attended)


def chunks(original, self, chunks):
    self._later_chunk = any(chunk.begin > chunk.prompt.donated for chunk in chunks)
    try:
        return original(self, chunks)
    finally:
        self._later_chunk = False


def decoding(original, self, index, query, width, bias):
    return original(self, index, query, width, bias) + 0.3


def positions(original, self, tokens):
    """Positions of generated tokens are too large by 3."""
    rope = self._rope
    self._rope = lambda places: rope(places + 3)
    try:
        return original(self, tokens)
    finally:
        del self._rope


def chunked(patch):
    around(Decoder, "prefill", chunks)(patch)
    around(Decoder, "_finish_layer", in_chunks)(patch)


def before_task_model(change):
    def started(original, self, model, *args, **named):
        change(model)
        original(self, model, *args, **named)

    return around(TaskModel, "__init__", started)


def trainer_temperature(original, self, micro, want, host=None):
    return original(self, micro, replace(want, temperature=1.0), host)


def trainer_model(change):
    def loaded(original, self, device):
        model = original(self, device)
        change(model)
        return model

    return around(HuggingFaceStrategy, "_load_model", loaded)


def wrong_epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1


def wrong_scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.4


def packed_leak(original, self, micro, want, host=None):
    outputs = original(self, micro, want, host)
    if len(micro.lengths) > 1:
        outputs = replace(outputs, logprobs_T=outputs.logprobs_T * 0.8)
    return outputs


PLANTS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "nudged weight": ("weights.differ", after_update(nudged), {}),
    "transposed weight": ("weights.differ", after_update(transposed), {}),
    "halves": ("weights.rounded", after_update(halves), {}),
    "skipped weight": ("weights.stale", around(LoadedWeights, "replace", skipped), {}),
    "frozen head": ("weights.stale", around(Decoder, "refresh", frozen_head), {}),
    "truncated prompt": ("inputs.truncation", prompt_of(lambda ids: ids[-10:]), {}),
    "start of sequence added": ("inputs.special_tokens", prompt_of(lambda ids: np.append(1, ids)), {}),
    "first token dropped": ("inputs.special_tokens", prompt_of(lambda ids: ids[1:]), {}),
    "raw logprobs": (
        "sampling.temperature",
        sampled_logprobs(lambda x: (x * 0.7).log_softmax(-1)),
        {"temperature": 0.7},
    ),
    "other temperature": ("sampling.temperature", temperature_of(0.85), {}),
    "top-p logprobs": ("sampling.processed_logprobs", sampled_logprobs(nucleus, needs_shaped=True), {"top_p": 0.8}),
    "top-k logprobs": ("sampling.processed_logprobs", sampled_logprobs(top_five, needs_shaped=True), {"top_k": 5}),
    "logprobs in bf16": ("arithmetic.logprobs", sampled_logprobs(lambda x: x.bfloat16().log_softmax(-1)), {}),
    "rope theta key": (
        "model.rope",
        lambda patch: None,
        {"engine": {"config_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}}},
    ),
    "epsilon key": ("model.norm_epsilon", lambda patch: None, {"engine": {"config_overrides": {"rms_norm_eps": 0.05}}}),
    "rope theta": ("model.rope", with_inv_freq(lambda x: x**1.4), {}),
    "rope scaling": ("model.rope_scaling", with_inv_freq(lambda x: x / 4), {"model": "llama"}),
    "attention scale": ("model.attention_scale", attention_scale(1.4), {}),
    "epsilon": ("model.norm_epsilon", norm_epsilon(0.02), {}),
    "tied head": ("model.tied_head", around(Decoder, "refresh", tied_head), {}),
    "dtype": ("arithmetic.dtype", lambda patch: None, {"engine": {"dtype": "bf16"}}),
    "bf16 head": ("arithmetic.head", around(Decoder, "_logits", bf16_head), {}),
    "bf16 norms": (
        "arithmetic.norm",
        around(Decoder, "_norm", lambda original, self, x, w: low(original(self, low(x), low(w)))),
        {},
    ),
    "bf16 rope": ("arithmetic.rope", rope_tables(lambda self, cos, sin: (low(cos), low(sin))), {}),
    "bf16 keys": ("arithmetic.kv_dtype", kv_rounded(torch.bfloat16), {}),
    "fp8 keys": ("arithmetic.kv_dtype", kv_rounded(torch.float8_e4m3fn), {"model": "llama"}),
    "prefix cache": ("engine.prefix_cache", around(Decoder, "_attend_chunks", donated), {}),
    "batch": ("engine.batch", around(Decoder, "decode", in_batches), {}),
    "decoding": ("engine.decode", around(Decoder, "_attend_rows", decoding), {}),
    "trainer's temperature": (
        "sampling.temperature",
        around(TaskModel, "outputs", trainer_temperature),
        {"temperature": 0.6},
    ),
    "trainer's epsilon": ("model.norm_epsilon", trainer_model(wrong_epsilon), {}),
    "trainer's scale": ("model.attention_scale", trainer_model(wrong_scaling), {"model": "llama"}),
    "trainer's packing": ("trainer.packing", around(TaskModel, "outputs", packed_leak), {}),
    "sharded trainer's epsilon": (
        "model.norm_epsilon",
        before_task_model(wrong_epsilon),
        {"trained_by": "fsdp2_train"},
    ),
    "sharded trainer's scale": (
        "model.attention_scale",
        before_task_model(wrong_scaling),
        {"trained_by": "fsdp2_train", "model": "llama"},
    ),
    "chunked prefill": (
        "engine.max_num_batched_tokens",
        chunked,
        {"config": {"max_num_batched_tokens": 12}},
    ),
    "positions": ("inputs.positions", around(Decoder, "decode", positions), {}),
}


SLOW = {
    "positions",
    "attention scale",
    "chunked prefill",
    "sharded trainer's epsilon",
    "sharded trainer's scale",
    "trainer's scale",
    "decoding",
    "epsilon",
    "tied head",
    "rope scaling",
}
"""Plants for which many values are searched."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow(ci=True)] if case in SLOW else []) for case in PLANTS]
)
def test_planted_cause_is_the_first(pair, monkeypatch, case):
    expected, plant, keys = PLANTS[case]
    plant(monkeypatch)
    assert first(pair(**keys).diagnose()) == expected


@pytest.mark.slow(ci=True)
def test_both_of_two_causes_are_named(pair, monkeypatch):
    attention_scale(1.4)(monkeypatch)
    temperature_of(0.8)(monkeypatch)
    causes = {cause.name for cause in pair(model="llama").diagnose().causes}
    assert causes == {"model.attention_scale", "sampling.temperature"}


@pytest.mark.slow(ci=True)
def test_causes_of_both_sides_are_named(pair, monkeypatch):
    trainer_model(wrong_epsilon)(monkeypatch)
    causes = pair(model="llama", engine={"dtype": "bf16"}).diagnose().causes
    assert causes[0].name == "model.norm_epsilon"


@pytest.mark.slow(ci=True)
def test_unknown_fault_is_located(pair, monkeypatch):
    """No edit reproduces it; the activations tell where it begins."""
    around(Decoder, "_norm", lambda original, self, x, w: original(self, x, w) + 0.1 * torch.sin(9 * x))(monkeypatch)
    assert first(pair().diagnose()) == "arithmetic.norm"


@pytest.mark.slow(ci=True)
def test_engine_without_activations_names_the_branch(pair, monkeypatch):
    plain = pair()
    blind = replace(plain.engine.provider, capabilities=replace(plain.engine.provider.capabilities, activations=False))
    attention_scale(1.4)(monkeypatch)
    diagnosis = replace(plain, engine=replace(plain.engine, provider=blind)).diagnose()
    assert first(diagnosis) == "model.attention_scale"
    assert diagnosis.not_examined


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_activations_of_trainers_equal_transformers(models, strategy):
    part = Part(
        provider=load_registry().find(TrainProvider, strategy), config={}, model=models["qwen3"], key="actor_train"
    )
    tokens = np.arange(3, 20)
    trainer = Trainer(part, "cpu")
    try:
        found = trainer.activations(ScoredTokens(tokens, 1))
    finally:
        trainer.strategy.close()
    model = load_model(models["qwen3"])
    with recorded(model) as expected, torch.no_grad():
        model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
    assert "model.layers.1.mlp.down_proj" in found
    for name in found.keys() & expected.keys():
        assert torch.allclose(found[name].flatten(), expected[name].flatten(), atol=1e-4), name


def test_command_examines_a_config(local_config, capsys):
    code = main(["doctor", "mismatch", str(local_config), "--json", "actor_infer.model_args.dtype=bf16"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [cause["name"] for cause in found["causes"]] == ["arithmetic.dtype"]
    assert found["causes"][0]["fix"] == "actor_infer.model_args.dtype: fp32"


@pytest.fixture
def local_config(tmp_path, monkeypatch):
    """A config with a small model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "rlvr.yaml"
    path.write_text(yaml.safe_dump(Runs(tmp_path, "local").rlvr()), encoding="utf-8")
    return path
