"""Models with images are trained on images: each number is compared to transformers, one row at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.media import image_media
from roll_core.data.pack import pack
from roll_core.errors import DataError, ModelError, UnsupportedError
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.rollout import IMAGE
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.export import write_model
from roll_modeling.model import image_parts, load_model
from roll_testing.errors import raises_error
from roll_testing.image_models import CONFIGS, IDS, IMAGE_TOKEN, MODEL_TYPES, VIDEO_TOKEN, VIDEO_TYPES, tiny_vision
from roll_testing.images import qwen_positions
from shared_tests.tiny_vision import picture, transformers_logprobs, vision_batch, vision_sequence

TRAINING = TrainingSpec(learning_rate=1e-2, weight_decay=0.1, num_steps=9)
FREEZE = [("vision", "projector"), ("vision",), ("projector",), ()]
PROJECTORS = ("merger", "multi_modal_projector")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Directory of each model type."""
    return {name: tiny_vision(tmp_path_factory.mktemp(name), name) for name in {*MODEL_TYPES, *VIDEO_TYPES}}


@pytest.fixture
def trainer(build, folders):
    """Strategy of a model type; arguments are those of `build`."""

    def make(model_type, **more):
        folder = str(folders[model_type])
        more.setdefault("path", folder)
        return build(tokenizer=folder, training=more.pop("training", TRAINING), **more)

    return make


def logprobs(strategy, sequences):
    return strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True)).logprobs_T


def part_of(name):
    if any(word in name for word in PROJECTORS):
        return "projector"
    return "vision" if "visual" in name or "vision_tower" in name else "language"


def unused(model_type, name):
    """True for parameters of Llava's encoder that its features skip."""
    return model_type == "llava" and ("layers.1." in name or "post_layernorm" in name) and "vision_tower" in name


@pytest.mark.parametrize("layout", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_rows_equal_rows_alone(trainer, folders, model_type, layout):
    strategy, sequences = trainer(model_type, attn_implementation=layout), vision_batch(folders[model_type])
    assert strategy.task_model.backbone.flat is (layout == "auto")
    with torch.no_grad():
        alone = transformers_logprobs(folders[model_type], sequences)
    torch.testing.assert_close(logprobs(strategy, sequences), alone, rtol=0, atol=5e-6)


@pytest.mark.parametrize("layout", ["auto", "sdpa", "eager"])
def test_sliding_layers_of_later_rows_see_whole_images(build, tmp_path, layout):
    """transformers looks for the images of a packed Gemma 3 at remapped positions, wrong from the second row on."""
    folder = tiny_vision(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["layer_types"] = ["sliding_attention"] * config["text_config"]["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    images = picture(56, 56), picture(56, 84, 1), picture(84, 56, 2)
    rows = [
        vision_sequence(folder, f"a{IMAGE}b", "cd", images[0], id="first"),
        vision_sequence(folder, f"{IMAGE}text that is longer than the window", "ef", images[1], id="second"),
        vision_sequence(folder, f"text that is longer{IMAGE}g{IMAGE}", "hi", *images[1:], id="third"),
    ]
    strategy = build(path=str(folder), tokenizer=str(folder), training=TRAINING, attn_implementation=layout)
    assert strategy.task_model.backbone.flat is (layout == "auto")
    with torch.no_grad():
        alone_T = transformers_logprobs(folder, rows)
    torch.testing.assert_close(logprobs(strategy, rows), alone_T, rtol=0, atol=5e-6)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_gradients_equal_those_of_rows_alone(trainer, folders, model_type):
    sequences = vision_batch(folders[model_type])
    strategy = trainer(model_type, freeze=())
    strategy.forward_backward(pack(sequences), sft_objective())
    model = load_model(strategy.spec)
    mask_T = torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in sequences]))
    (-(transformers_logprobs(folders[model_type], sequences, model) * mask_T).sum() / mask_T.sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in strategy.model.named_parameters():
        expected = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        error = float((parameter.grad - expected).norm())
        assert error <= 2e-5 * float(expected.norm()) + 1e-7, name
        assert bool(expected.any()) != unused(model_type, name), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_gradients_are_equal(trainer, folders, model_type, recompute):
    micros = pack(vision_batch(folders[model_type]))
    gradients = []
    for checkpointing in (False, True):
        config = {"recompute_granularity": recompute} if checkpointing else {}
        strategy = trainer(model_type, freeze=(), gradient_checkpointing=checkpointing, config=hf_config(**config))
        strategy.forward_backward(micros, sft_objective())
        gradients.append(strategy.optimizer.flat_grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)


def hf_config(**keys):
    from roll_strategy_hf.config import HFTrainConfig

    return HFTrainConfig(**keys)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("freeze", FREEZE)
def test_frozen_parts_are_not_trained(trainer, folders, model_type, freeze):
    strategy = trainer(model_type, freeze=freeze)
    before = {name: tensor.clone() for name, tensor in strategy.export_weights()}
    strategy.forward_backward(pack(vision_batch(folders[model_type])), sft_objective())
    strategy.optimizer_step()
    changed = {name for name, tensor in strategy.export_weights() if not torch.equal(tensor, before[name])}
    assert {part_of(name) for name in changed} == {"language", "vision", "projector"} - set(freeze)
    expected = {name for name in before if part_of(name) not in freeze}
    assert set(strategy.optimizer.parameters) == expected
    assert set(strategy.frozen_weights()) == before.keys() - expected
    assert {name for name in expected - changed if not unused(model_type, name)} == set()


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_text_alone_gives_the_encoder_gradients_of_zero(trainer, folders, model_type):
    strategy = trainer(model_type, freeze=())
    strategy.forward_backward(pack([vision_sequence(folders[model_type], "text", "reply")]), sft_objective())
    zero = {name for name, each in strategy.model.named_parameters() if not each.grad.any()}
    assert {part_of(name) for name in zero} == {"vision", "projector"}
    assert strategy.optimizer_step().grad_norm > 0


@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_positions_are_those_of_the_model(trainer, folders, model_type):
    """transformers 5.24 lets text after a video of Qwen2.5-VL begin at positions that the video has already."""
    strategy, sequences = trainer(model_type), vision_batch(folders[model_type])
    reader = strategy.task_model.images
    for sequence in (sequence for sequence in sequences if sequence.media):
        tokens = torch.from_numpy(sequence.tokens)
        found = reader.read(tokens, [len(tokens)], [sequence.media], [sequence.id]).positions_AT
        expected = qwen_positions(tokens, sequence.media, reader.processor, strategy.model.config)
        assert torch.equal(found, expected), sequence.id
        arrays = {}
        for kind in ("image", "video"):
            arrays |= reader.processor.inputs([media for media in sequence.media if media.kind == kind])
        types = (tokens == IDS[IMAGE_TOKEN]).long() + 2 * (tokens == IDS[VIDEO_TOKEN]).long()
        grids = {name: torch.from_numpy(array) for name, array in arrays.items() if "pixel" not in name}
        model = strategy.model.model.get_rope_index(input_ids=tokens[None], mm_token_type_ids=types[None], **grids)
        expected, end = model[0][:, 0], len(tokens)
        if model_type == "qwen2_5_vl" and any(media.frames for media in sequence.media):
            end = int((types == 2).nonzero()[0]) + 2  # the first tokens of the first video
        assert torch.equal(found[:, :end], expected[:, :end]), sequence.id


@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_images_and_videos_are_encoded_together(trainer, folders, model_type):
    """Ranks of FSDP gather the encoder's parameters as often as any of them runs it."""
    strategy = trainer(model_type)
    runs = []
    strategy.model.model.visual.register_forward_hook(lambda *_: runs.append(1))
    logprobs(strategy, vision_batch(folders[model_type]))
    assert len(runs) == 1


@pytest.mark.parametrize("model_type", sorted({*MODEL_TYPES, *VIDEO_TYPES}))
def test_equal_images_are_encoded_once(trainer, folders, model_type):
    """Samples of a group have the images of one prompt."""
    folder = folders[model_type]
    group = [replace(row, id=f"{row.id} sample {i}") for row in vision_batch(folder) for i in range(3)]
    strategy, sizes = trainer(model_type, freeze=()), []

    def gradients(rows):
        strategy.model.zero_grad()
        strategy.forward_backward(pack(rows), sft_objective())
        named = {name: parameter.grad for name, parameter in strategy.model.named_parameters()}
        return {name: grad for name, grad in named.items() if grad is not None and grad.any()}

    image_parts(strategy.model)["vision"][0].register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(next(iter([*args, *kwargs.values()])))), with_kwargs=True
    )
    with torch.no_grad():
        expected_T = transformers_logprobs(folder, group)
    torch.testing.assert_close(logprobs(strategy, group), expected_T, rtol=0, atol=5e-6)
    alone, together = gradients(vision_batch(folder)), gradients(group)
    assert len(set(sizes)) == 1
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        error = float((together[name] - expected).norm())
        assert error <= 2e-5 * float(expected.norm()) + 1e-7, name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_images_give_other_numbers(trainer, folders, model_type):
    folder = folders[model_type]

    def row(*images):
        return vision_sequence(folder, f"a{IMAGE}b{IMAGE}", "reply", *images)

    strategy = trainer(model_type)
    black, first, second = picture(64, 64, black=True), picture(64, 64), picture(64, 64, 1)
    right = logprobs(strategy, [row(first, second)])[-5:]
    for images in ((second, first), (black, black), (first, black)):
        assert float((logprobs(strategy, [row(*images)])[-5:] - right).abs().max()) > 1e-2


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3"])
def test_bf16_uses_the_same_attention(trainer, folders, model_type):
    single, half = trainer(model_type), trainer(model_type, dtype="bf16")
    assert half.task_model.images.both_ways is (model_type == "gemma3")
    sequences = vision_batch(folders[model_type])
    assert float((logprobs(half, sequences) - logprobs(single, sequences)).abs().mean()) < 0.05


@pytest.mark.parametrize("freeze", [FREEZE[0], ()])
def test_a_loaded_state_continues_bit_for_bit(trainer, folders, tmp_path, freeze):
    micros = pack(vision_batch(folders["qwen3_vl"]))

    def step(strategy):
        strategy.forward_backward(micros, sft_objective())
        return strategy.optimizer_step()

    straight = trainer("qwen3_vl", freeze=freeze)
    step(straight)
    straight.save(tmp_path)
    resumed = trainer("qwen3_vl", freeze=freeze)
    resumed.load(tmp_path)
    assert step(resumed) == step(straight)
    for (name, one), (_, other) in zip(straight.export_weights(), resumed.export_weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_an_exported_model(trainer, folders, tmp_path, model_type):
    sequences = vision_batch(folders[model_type])
    strategy = trainer(model_type, freeze=())
    strategy.forward_backward(pack(sequences), sft_objective())
    strategy.optimizer_step()
    strategy.export_model(tmp_path)
    with torch.no_grad():
        alone = transformers_logprobs(tmp_path, sequences)
    torch.testing.assert_close(logprobs(strategy, sequences), alone, rtol=0, atol=1e-5)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := folders[model_type] / name).is_file():
            assert json.loads((tmp_path / name).read_text()) == json.loads(file.read_text())


def test_a_new_model_is_exported_with_its_processor(folders, tmp_path):
    folder = folders["qwen2_5_vl"]
    random_init = {"model_type": "qwen2_5_vl", **CONFIGS["qwen2_5_vl"]}
    spec = ModelSpec(random_init=random_init, tokenizer=str(folder), dtype="fp32")
    model = load_model(spec)
    write_model(model, spec, model.state_dict(), tmp_path)
    files = [json.loads((place / "preprocessor_config.json").read_text()) for place in (folder, tmp_path)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (("all-linear",), {"language"}),
        (("q_proj", "qkv"), {"language"}),
        (".*proj", {"language"}),
        (("q_proj", "visual.blocks.0.attn.qkv"), {"language", "vision"}),
        (r".*(visual\.merger\.linear_fc1|q_proj)", {"language", "projector"}),
    ],
)
def test_adapters_leave_out_images_unless_named(trainer, folders, targets, parts):
    if "qkv" in targets:
        with raises_error(ModelError, "qkv"):
            trainer("qwen3_vl", lora=LoraSpec(targets=targets, rank=2, alpha=4.0))
        return
    strategy = trainer("qwen3_vl", lora=LoraSpec(targets=targets, rank=2, alpha=4.0))
    micros = pack(vision_batch(folders["qwen3_vl"]))
    for _ in range(2):  # one factor is 0, so that the other has no gradient in the first step
        strategy.forward_backward(micros, sft_objective())
        strategy.optimizer_step()
    adapters = {name: each for name, each in strategy.model.named_parameters() if ".lora_" in name}
    assert {part_of(name) for name in adapters} == parts
    exported = {name for name, _ in strategy.export_weights() if part_of(name) not in parts}
    assert set(strategy.frozen_weights()) == exported
    assert all(each.any() for name, each in adapters.items())


def test_a_critic_reads_images(trainer, folders):
    strategy = trainer("qwen3_vl", task="value")
    want = WantedOutputs(values=True)
    rows = [vision_sequence(folders["qwen3_vl"], f"a{IMAGE}", "reply", picture(64, 64, seed)) for seed in (0, 1)]
    one, other = (strategy.forward(pack([row])[0], want).values_T for row in rows)
    assert not torch.equal(one[-5:], other[-5:])
    sequences = [replace(row, returns=np.ones(len(row), dtype=np.float32)) for row in rows]
    strategy.forward_backward(pack(sequences), ValueObjective())
    assert strategy.optimizer_step().grad_norm > 0


def test_an_image_in_a_response_is_an_error(trainer, folders):
    strategy, folder = trainer("qwen2_5_vl"), folders["qwen2_5_vl"]
    row = vision_sequence(folder, f"a{IMAGE}", "reply", picture(56, 56), id="row 7")
    sampled = replace(row, tokens=np.where(np.arange(len(row)) == len(row) - 1, IDS[IMAGE_TOKEN], row.tokens))
    surplus = replace(row, media=(*row.media, image_media(picture(28, 28))))
    cut = replace(row, tokens=row.tokens[:4], loss_mask=np.arange(4) > 2)
    for wrong in (sampled, surplus, cut, replace(row, media=())):
        with raises_error(DataError, "row 7"):
            logprobs(strategy, [vision_sequence(folder, "text", "reply"), wrong])


def test_images_without_text_between_are_an_error_of_qwen(trainer, folders):
    row = vision_sequence(folders["qwen2_5_vl"], f"{IMAGE}{IMAGE}", "reply", picture(28, 28), picture(28, 28, 1))
    tokens = np.array([token for token in row.tokens if token not in (IDS["<|vision_start|>"], IDS["<|vision_end|>"])])
    row = replace(row, tokens=tokens, loss_mask=np.arange(len(tokens)) > 2, id="row 3")
    with raises_error(DataError, "row 3"):
        logprobs(trainer("qwen2_5_vl"), [row])


def test_without_a_processor_images_are_refused(build, folders, tmp_path):
    folder = folders["qwen3_vl"]
    text_only = tmp_path / "model"
    shutil.copytree(folder, text_only)
    (text_only / "preprocessor_config.json").unlink()
    strategy = build(path=str(text_only), training=TRAINING)
    with raises_error(UnsupportedError):
        logprobs(strategy, vision_batch(folder))
    assert logprobs(strategy, [vision_sequence(folder, "text", "reply")]).any()
    with raises_error(ModelError, "freeze"):
        build(path=str(text_only), training=TRAINING, freeze=("projector",))


def test_an_unusable_processor_matters_for_images_alone(build, folders, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(folders["qwen2_5_vl"], broken)
    settings = json.loads((broken / "preprocessor_config.json").read_text(encoding="utf-8"))
    (broken / "preprocessor_config.json").write_text(json.dumps(settings | {"processor_class": "OfNobody"}))
    strategy = build(path=str(broken), training=TRAINING)
    assert logprobs(strategy, [vision_sequence(folders["qwen2_5_vl"], "text", "reply")]).any()
    with raises_error(UnsupportedError):
        logprobs(strategy, vision_batch(folders["qwen2_5_vl"]))
    with raises_error(ModelError, "OfNobody"):
        build(path=str(broken), training=TRAINING, freeze=())
