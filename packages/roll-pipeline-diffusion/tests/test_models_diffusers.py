"""Flow models beside diffusers itself."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers")

from roll_core.errors import DataError, ModelError  # noqa: E402
from roll_core.spec.model import LoraSpec, MeshInfo, ModelSpec  # noqa: E402
from roll_core.spec.module_program import ModuleBatch, ProgramModule  # noqa: E402
from roll_core.spec.train import LossOutput, TrainingSpec  # noqa: E402
from roll_pipeline_diffusion.cache import ArrayCache  # noqa: E402
from roll_pipeline_diffusion.decoding import LatentDecoder, to_uint8  # noqa: E402
from roll_pipeline_diffusion.encoders import ImageEncoder, PromptEncoder  # noqa: E402
from roll_pipeline_diffusion.models.description import describe, describe_vae  # noqa: E402
from roll_pipeline_diffusion.models.families import FAMILIES  # noqa: E402
from roll_pipeline_diffusion.models.library import LIBRARY as LIBRARY_NAME  # noqa: E402
from roll_pipeline_diffusion.models.library import FlowModel  # noqa: E402
from roll_testing.errors import raises_error  # noqa: E402
from shared_tests.flow_models import (  # noqa: E402
    LIBRARY,
    TINY,
    loaded,
    save_without_text,
    scheduler,
    spec_of,
    tiny_keys,
    tiny_sd3,
    tiny_vae,
    wan_pipeline,
)

NAMES = tuple(FAMILIES)


def noise(name: str, rows: int = 2, seed: int = 0) -> torch.Tensor:
    """Noise that the tiny model takes."""
    shape = (rows, 4, 3, 8, 8) if name.startswith("Wan") else (rows, 16 if name.startswith("Flux2") else 4, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditioning_of(name: str, rows: int = 2, tokens: int = 5, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random conditioning of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    family = FAMILIES[name]
    made = {}
    for key, each in family.conditioning(family.config(TINY[name])).items():
        shape = (rows, *(tokens if size is None else size for size in each.shape))
        made[key] = torch.ones(shape, dtype=torch.bool) if each.mask else torch.randn(shape, generator=generator)
    if "guidance" in made:
        made["guidance"] = torch.full((rows,), 3.5)
    return made


# -- equal to diffusers ------------------------------------------------------------------------------------------------


def ode(model: FlowModel, noise: Tensor, sigmas: Tensor, conditioning: dict[str, Tensor], guide: Any = None) -> Tensor:
    """Euler steps over `sigmas`, written out: x' = x + v dt."""
    x = noise
    with torch.no_grad():
        for now, after in itertools.pairwise(sigmas):
            velocity = model(x, now.expand(len(x)), **conditioning)
            velocity = velocity if guide is None else guide(x, now.expand(len(x)), velocity)
            x = x + velocity * (after - now)
    return x


def pack(latents: Tensor) -> Tensor:
    """FLUX's packing, patch by patch."""
    rows = []
    for image in latents:
        patches = [
            torch.stack([image[c, 2 * i + di, 2 * j + dj] for c in range(4) for di in range(2) for dj in range(2)])
            for i in range(image.shape[1] // 2)
            for j in range(image.shape[2] // 2)
        ]
        rows.append(torch.stack(patches))
    return torch.stack(rows)


def test_sd3_with_guidance_samples_as_the_pipeline_of_diffusers() -> None:
    model = loaded(spec_of("SD3Transformer2DModel"))
    pipe = diffusers.StableDiffusion3Pipeline(
        model.transformer, scheduler(shift=3.0), tiny_vae(), None, None, None, None, None, None
    )
    pipe.set_progress_bar_config(disable=True)
    x, given = noise("SD3Transformer2DModel"), conditioning_of("SD3Transformer2DModel")
    unconditional = conditioning_of("SD3Transformer2DModel", seed=9)
    expected = pipe(
        latents=x, num_inference_steps=4, guidance_scale=3.0, output_type="latent", height=16, width=16,
        prompt_embeds=given["prompt_embeds"], pooled_prompt_embeds=given["pooled_prompt_embeds"],
        negative_prompt_embeds=unconditional["prompt_embeds"],
        negative_pooled_prompt_embeds=unconditional["pooled_prompt_embeds"],
    ).images  # fmt: skip

    def guide(latents: Tensor, sigma: Tensor, velocity: Tensor) -> Tensor:
        without = model(latents, sigma, **unconditional)
        return without + 3.0 * (velocity - without)

    found = ode(model, x, pipe.scheduler.sigmas, given, guide)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_flux_samples_as_the_pipeline_of_diffusers() -> None:
    name = "FluxTransformer2DModel"
    model = loaded(spec_of(name))
    pipe = diffusers.FluxPipeline(scheduler(), tiny_vae(), None, None, None, None, model.transformer)
    pipe.set_progress_bar_config(disable=True)
    x, given = noise(name), conditioning_of(name)
    expected = pipe(
        latents=pack(x), num_inference_steps=4, guidance_scale=3.5, output_type="latent", height=16, width=16,
        prompt_embeds=given["prompt_embeds"], pooled_prompt_embeds=given["pooled_prompt_embeds"],
    ).images  # fmt: skip
    found = ode(model, x, pipe.scheduler.sigmas, given)
    torch.testing.assert_close(pack(found), expected, rtol=1e-4, atol=1e-4)


def test_flux2_samples_as_the_pipeline_of_diffusers() -> None:
    name = "Flux2Transformer2DModel"
    model = loaded(spec_of(name))
    pipe = diffusers.Flux2Pipeline(
        vae=None, text_encoder=None, tokenizer=None, scheduler=scheduler(), transformer=model.transformer
    )
    pipe.set_progress_bar_config(disable=True)
    x, given = noise(name), conditioning_of(name)
    expected = pipe(
        latents=x, num_inference_steps=4, guidance_scale=3.5, output_type="latent", height=128, width=128,
        prompt_embeds=given["prompt_embeds"],
    ).images  # fmt: skip
    found = ode(model, x, pipe.scheduler.sigmas, given)
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), expected, rtol=1e-4, atol=1e-4)


def test_qwen_image_samples_as_the_pipeline_of_diffusers() -> None:
    name = "QwenImageTransformer2DModel"
    model = loaded(spec_of(name))
    pipe = diffusers.QwenImagePipeline(scheduler(), None, None, None, model.transformer)
    pipe.set_progress_bar_config(disable=True)
    x, given = noise(name), conditioning_of(name)
    given["prompt_embeds_mask"][1, 3:] = False
    expected = pipe(
        latents=pack(x), num_inference_steps=4, true_cfg_scale=1.0, output_type="latent", height=64, width=64,
        prompt_embeds=given["prompt_embeds"], prompt_embeds_mask=given["prompt_embeds_mask"],
    ).images  # fmt: skip
    found = ode(model, x, pipe.scheduler.sigmas, given)
    torch.testing.assert_close(pack(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts", [1, 2])
def test_wan_samples_as_the_pipeline_of_diffusers(experts: int, tmp_path: Path) -> None:
    name = "WanTransformer3DModel"
    pipe = wan_pipeline(experts)
    model = loaded(ModelSpec(task="flow", path=str(save_without_text(pipe, tmp_path))))
    assert model.description.boundary == (0.8 if experts == 2 else None)
    x, given = noise(name), conditioning_of(name)
    expected = pipe(
        latents=x, num_inference_steps=4, guidance_scale=1.0, output_type="latent", height=64, width=64, num_frames=9,
        prompt_embeds=given["prompt_embeds"],
    ).frames  # fmt: skip
    found = ode(model, x, pipe.scheduler.sigmas, given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_above_and_below_the_boundary_use_their_own_expert(tmp_path: Path) -> None:
    name = "WanTransformer3DModel"
    model = loaded(ModelSpec(task="flow", path=str(save_without_text(wan_pipeline(2), tmp_path))))
    x, given, sigma = noise(name), conditioning_of(name), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        together = model(x, sigma, **given)
        for row in range(2):
            alone = model(x[row : row + 1], sigma[row : row + 1], prompt_embeds=given["prompt_embeds"][row : row + 1])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)
    first, second = (getattr(model, each) for each in ("transformer", "transformer_2"))
    model(x, sigma, **given).sum().backward()
    assert all(each.grad is not None for part in (first, second) for each in part.parameters())


@pytest.mark.parametrize("variance", [False, True])
def test_sana_samples_as_the_pipeline_of_diffusers(variance: bool) -> None:
    name = "SanaTransformer2DModel"
    model = loaded(spec_of(name, **({"out_channels": 8} if variance else {})))
    pipe = diffusers.SanaPipeline(None, None, None, model.transformer, scheduler())
    pipe.set_progress_bar_config(disable=True)
    x, given = noise(name), conditioning_of(name)
    given["prompt_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    expected = pipe(
        latents=x, num_inference_steps=4, guidance_scale=1.0, output_type="latent", height=256, width=256,
        prompt_embeds=given["prompt_embeds"], prompt_attention_mask=given["prompt_attention_mask"],
        use_resolution_binning=False, negative_prompt=None,
    ).images  # fmt: skip
    found = ode(model, x, pipe.scheduler.sigmas, given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- every family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_defaults_of_a_family_are_those_of_diffusers(name: str) -> None:
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    defaults = {key: parameters[key].default for key in FAMILIES[name].defaults}
    assert defaults == dict(FAMILIES[name].defaults)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_batch_does_not_depend_on_the_others(name: str) -> None:
    model = loaded(spec_of(name))
    x, given, sigma = noise(name), conditioning_of(name), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        together = model(x, sigma, **given)
        alone = model(x[1:], sigma[1:], **{key: each[1:] for key, each in given.items()})
        again = model(x, sigma.flip(0), **given)
    assert together.shape == x.shape
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, again)  # σ matters


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_equal_with_checkpointed_blocks(name: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = loaded(spec_of(name))
    blocks = LIBRARY.blocks(model)
    parameters = FAMILIES[name].config(TINY[name])
    assert len(blocks) == parameters["num_layers"] + parameters.get("num_single_layers", 0)
    x, given, sigma = noise(name), conditioning_of(name), torch.tensor([0.9, 0.3])
    model(x, sigma, **given).square().mean().backward()
    expected = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    for block in blocks:
        parent, place = next(
            (parent, key) for parent in model.modules() for key, child in parent.named_children() if child is block
        )
        setattr(parent, place, checkpoint_wrapper(block))
    model(x, sigma, **given).square().mean().backward()
    found = {
        key.replace("_checkpoint_wrapped_module.", ""): each.grad
        for key, each in model.named_parameters()
        if each.grad is not None
    }
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each)


@pytest.mark.parametrize("name", NAMES)
def test_exported_model_is_loaded_by_its_class_and_the_library(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    model = loaded(spec)
    trained = {key: each.detach() + 0.5 for key, each in model.named_parameters()}
    LIBRARY.write(model, spec, trained, tmp_path / "model")
    theirs = getattr(diffusers, name).from_pretrained(tmp_path / "model")
    ours = loaded(ModelSpec(task="flow", path=str(tmp_path / "model")))
    for key, each in theirs.named_parameters():
        assert torch.equal(each, trained[f"transformer.{key}"])
    for key, each in ours.state_dict().items():
        assert torch.equal(each, theirs.state_dict()[key.removeprefix("transformer.")])


def test_equal_seeds_give_equal_weights_and_keep_random_states() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    spec = spec_of("SD3Transformer2DModel")
    one, half = loaded(spec), loaded(replace(spec, dtype="bf16"))
    other = loaded(replace(spec, seed=8))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not one.training
    for key, each in one.named_parameters():
        assert torch.equal(each.to(torch.bfloat16), half.get_parameter(key))
    assert not torch.equal(one.transformer.proj_out.weight, other.transformer.proj_out.weight)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_close_to_single_precision(name: str) -> None:
    spec = spec_of(name)
    x, given, sigma = noise(name), conditioning_of(name), torch.tensor([0.9, 0.3])
    half = {
        key: each.bfloat16() if each.dim() > 1 and each.is_floating_point() else each for key, each in given.items()
    }
    with torch.no_grad():
        expected = loaded(spec)(x, sigma, **given)
        found = loaded(replace(spec, dtype="bf16"))(x.bfloat16(), sigma, **half)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)


def test_half_precision_models_have_one_dtype(tmp_path: Path) -> None:
    spec = spec_of("WanTransformer3DModel")
    model = loaded(spec)
    LIBRARY.write(model, spec, dict(model.named_parameters()), tmp_path)
    half = loaded(ModelSpec(task="flow", path=str(tmp_path), dtype="bf16"))
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}


def test_exported_pipeline_has_new_weights_and_other_components(tmp_path: Path) -> None:
    source = save_without_text(wan_pipeline(2), tmp_path / "source")
    (source / "wan.safetensors").write_bytes(b"the old weights in one file")
    before = (source / "transformer_2" / "config.json").read_text()
    spec = ModelSpec(task="flow", path=str(source))
    model = loaded(spec)
    trained = {key: each.detach() + 0.5 for key, each in model.named_parameters()}
    LIBRARY.write(model, spec, trained, tmp_path / "new")
    LIBRARY.write(model, spec, trained, tmp_path / "new")  # again, over the first
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "new", text_encoder=None, tokenizer=None)
    assert isinstance(pipe, diffusers.WanPipeline)
    assert pipe.config.boundary_ratio == 0.8
    for name in ("transformer", "transformer_2"):
        for key, each in getattr(pipe, name).named_parameters():
            assert torch.equal(each, trained[f"{name}.{key}"])
    old = diffusers.AutoencoderKLWan.from_pretrained(source / "vae").state_dict()
    assert all(torch.equal(each, old[key]) for key, each in pipe.vae.state_dict().items())
    assert not (tmp_path / "new" / "wan.safetensors").exists()
    weights = Path("vae", "diffusion_pytorch_model.safetensors")
    assert (tmp_path / "new" / weights).samefile(source / weights)
    assert not (tmp_path / "new" / "model_index.json").samefile(source / "model_index.json")
    assert (source / "transformer_2" / "config.json").read_text() == before


# -- train strategies --------------------------------------------------------------------------------------------------


def flow_matching(module: ProgramModule, batch: ModuleBatch) -> LossOutput:
    """Mean squared distance to velocities of 1."""
    given = {key.removeprefix("cond."): each for key, each in batch.tensors.items() if key.startswith("cond.")}
    velocity = module(batch.tensors["x"], batch.tensors["sigma"], **given).float()
    return LossOutput(loss=(velocity - 1).square().flatten(1).mean(1).sum() / batch.total_rows, metrics={})


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_knows_the_size_of_every_family(name: str) -> None:
    spec = spec_of(name)
    model, size = loaded(spec), LIBRARY.size(spec)
    assert size.parameters == sum(each.numel() for each in model.parameters())
    assert len(size.layers) == len(LIBRARY.blocks(model))
    targets = [each for layer in size.layers for each in layer.linears if each.path.endswith("to_q")]
    assert {(each.inputs, each.outputs) for each in targets} == {(size.hidden_size, size.hidden_size)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lora", [False, True])
def test_strategy_trains_every_family_and_exports_for_diffusers(name: str, lora: bool, tmp_path: Path) -> None:
    pytest.importorskip("roll_modeling.module_programs")
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy

    adapters = LoraSpec(targets=("all-linear",), rank=2, alpha=4.0) if lora else None
    spec = replace(spec_of(name), library=LIBRARY_NAME, lora=adapters, gradient_checkpointing=True)
    training = TrainingSpec(learning_rate=1e-2, lr_scheduler_type="constant", num_steps=10)
    given = {f"cond.{key}": each for key, each in conditioning_of(name).items()}
    tensors = {"x": noise(name), "sigma": torch.tensor([0.9, 0.3]), **given}
    batch = ModuleBatch(ids=("a", "b"), tensors=tensors, total_rows=2)
    strategy = HFTrainStrategy(HFTrainConfig(), training)
    losses = []
    strategy.build(spec, MeshInfo(role="actor_train"))
    try:
        for _ in range(4):
            (metrics,) = strategy.forward_backward_module([batch], flow_matching)
            losses.append(metrics)
            strategy.optimizer_step()
        (outputs,) = strategy.run_module([batch], VelocityProgram())
        weights = {key: each.clone() for key, each in strategy.export_weights()}
        strategy.export_model(tmp_path / "model")
    finally:
        strategy.close()
    again = loaded(ModelSpec(task="flow", path=str(tmp_path / "model")))
    named = dict(again.named_parameters())
    assert named.keys() <= weights.keys()
    assert all(torch.equal(each, weights[key]) for key, each in named.items())
    with torch.no_grad():
        found = again(tensors["x"], tensors["sigma"], **conditioning_of(name))
    torch.testing.assert_close(found, outputs["v"], rtol=1e-4, atol=1e-5)
    before = loaded(spec_of(name))
    with torch.no_grad():
        first, last = (
            float((each(tensors["x"], tensors["sigma"], **conditioning_of(name)) - 1).square().mean())
            for each in (before, again)
        )
    assert last < first


class VelocityProgram:
    """The model's velocities."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> dict[str, Tensor]:
        given = {key.removeprefix("cond."): each for key, each in batch.tensors.items() if key.startswith("cond.")}
        return {"v": module(batch.tensors["x"], batch.tensors["sigma"], **given)}


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_missing_and_surplus_weights_are_refused(tmp_path: Path) -> None:
    spec = spec_of("SD3Transformer2DModel")
    model = loaded(spec)
    state = dict(model.named_parameters())
    lacking = {key: each for key, each in state.items() if key != "transformer.proj_out.bias"}
    with raises_error(ModelError, "proj_out.bias"):
        LIBRARY.write(model, spec, lacking, tmp_path)
    with raises_error(ModelError, "transformer.strange"):
        LIBRARY.write(model, spec, {**state, "transformer.strange": torch.ones(1)}, tmp_path)
    with raises_error(ModelError, "other.weight"):
        LIBRARY.write(model, spec, {**state, "other.weight": torch.ones(1)}, tmp_path)


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"_class_name": "UNet2DModel"}, ["UNet2DModel", "SD3Transformer2DModel"]),
        ({}, ["_class_name", "SD3Transformer2DModel"]),
        (tiny_keys("SD3Transformer2DModel", patchsize=2), ["patchsize", "patch_size"]),
        (tiny_keys("WanTransformer3DModel", image_dim=8), ["WanTransformer3DModel", "image_dim"]),
        (tiny_keys("QwenImageTransformer2DModel", zero_cond_t=True), ["zero_cond_t"]),
        (tiny_keys("SD3Transformer2DModel", num_layers="two"), ["SD3Transformer2DModel"]),
    ],
)
def test_a_bad_config_is_refused(keys: dict[str, Any], facts: list[str]) -> None:
    with raises_error(ModelError, *facts):
        LIBRARY.load(ModelSpec(task="flow", random_init=keys))


def test_bad_directories_are_refused(tmp_path: Path) -> None:
    for content, facts in (("{", ["config.json"]), ("[]", ["config.json", "list"])):
        (tmp_path / "config.json").write_text(content)
        with raises_error(ModelError, *facts):
            LIBRARY.load(ModelSpec(task="flow", path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(tiny_keys("SD3Transformer2DModel")))
    with raises_error(ModelError, str(tmp_path)):  # no weights
        LIBRARY.load(ModelSpec(task="flow", path=str(tmp_path)))
    with raises_error(ModelError, "a/model"):
        LIBRARY.load(ModelSpec(task="flow", path="a/model"))
    (tmp_path / "model_index.json").write_text("{}")
    with raises_error(ModelError, "model_index.json", "transformer"):
        LIBRARY.load(ModelSpec(task="flow", path=str(tmp_path)))


def test_conditioning_of_wrong_names_and_shapes_is_refused() -> None:
    name = "SD3Transformer2DModel"
    model, x, given, sigma = loaded(spec_of(name)), noise(name), conditioning_of(name), torch.tensor([0.9, 0.3])
    for wrong, facts in (
        ({"prompt_embeds": given["prompt_embeds"]}, ["pooled_prompt_embeds"]),
        ({**given, "guidance": torch.ones(2)}, ["guidance"]),
        ({**given, "prompt_embeds": torch.ones(2, 5, 17)}, ["prompt_embeds", "17", "16"]),
        ({**given, "pooled_prompt_embeds": torch.ones(2, 1, 12)}, ["pooled_prompt_embeds", "12"]),
    ):
        with raises_error(DataError, *facts):
            model(x, sigma, **wrong)
    for latents, noise_level in ((x[:, :3], sigma), (x[..., None], sigma), (x, sigma[:1]), (x, torch.tensor(0.5))):
        with pytest.raises(DataError):
            model(latents, noise_level, **given)


def test_latent_shapes_follow_the_vae(tmp_path: Path) -> None:
    image = describe(spec_of("SD3Transformer2DModel"))
    assert image.latent_shape(8, 16) == (4, 8, 16)  # no VAE: pixels
    for size in ((7, 8), (8, 0)):
        with raises_error(DataError, "2"):
            image.latent_shape(*size)
    with raises_error(DataError, "frames"):
        image.latent_shape(8, 8, 5)
    video = describe(ModelSpec(task="flow", path=str(save_without_text(wan_pipeline(1), tmp_path))))
    assert video.latent_shape(64, 32, 9) == (4, 3, 8, 4)
    for size in ((64, 32, 8), (64, 24, 9), (64, 32, None)):
        with pytest.raises(DataError):
            video.latent_shape(*size)
    json.dumps(copy.deepcopy(dict(image.config)))


# -- VAE ---------------------------------------------------------------------------------------------------------------

VAES = {"AutoencoderKL": 2, "AutoencoderKLFlux2": 4, "AutoencoderDC": 2, "AutoencoderKLQwenImage": 8}


@pytest.mark.parametrize(("name", "factor"), VAES.items())
def test_images_are_encoded_and_decoded_as_by_diffusers(name: str, factor: int, tmp_path: Path) -> None:
    vae = tiny_vae(name)
    if name == "AutoencoderKLFlux2":
        vae.bn.running_mean.copy_(torch.linspace(-1, 1, 16))
        vae.bn.running_var.copy_(torch.linspace(0.5, 2, 16))
    vae.save_pretrained(tmp_path / "vae")
    description = describe_vae(tmp_path)
    assert description is not None
    assert description.spatial == factor
    decoder = LatentDecoder(directory=str(tmp_path))
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = decoder.encode(pixels)
    assert latents.shape == (2, 16 if name == "AutoencoderKLFlux2" else 4, 16 // factor, 16 // factor)
    found = decoder.decode(latents)
    assert found.shape == pixels.shape
    # What the pipeline of each family does with latents before `vae.decode`.
    with torch.no_grad():
        if name == "AutoencoderKL":
            expected = vae.decode(latents / 1.5 + 0.1).sample
        elif name == "AutoencoderDC":
            expected = vae.decode(latents / 0.5).sample
        elif name == "AutoencoderKLQwenImage":
            mean, std = (torch.tensor(each).view(1, 4, 1, 1, 1) for each in (vae.config.latents_mean, [1.5, 2, 0.5, 1]))
            expected = vae.decode(latents[:, :, None] / (1 / std) + mean).sample[:, :, 0]
        else:
            std = (vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()
            grid = latents * std + vae.bn.running_mean.view(1, -1, 1, 1)
            expected = vae.decode(diffusers.Flux2Pipeline._unpatchify_latents(grid)).sample
    torch.testing.assert_close(found, expected.clamp(-1, 1), rtol=1e-4, atol=1e-5)
    # Encoding is the inverse of what happens before decoding: the mean of the VAE's distribution comes back.
    with torch.no_grad():
        raw = vae.encode(pixels[:, :, None] if name == "AutoencoderKLQwenImage" else pixels)
        raw = raw.latent if hasattr(raw, "latent") else raw.latent_dist.mode()
        captured: list[Tensor] = []
        decoder_of(decoder).vae.decode = lambda z, return_dict=True: (
            captured.append(z),
            (z.new_zeros(2, 3, 1, 1, 1),),
        )[1]
        decoder_of(decoder).decode(latents)
    torch.testing.assert_close(captured[0], raw, rtol=1e-4, atol=1e-5)


def decoder_of(decoder: LatentDecoder) -> Any:
    from roll_pipeline_diffusion.decoding import _load_vae

    return _load_vae(decoder.directory, decoder.dtype, "cpu")


def test_videos_are_decoded_in_slices_with_gradients(tmp_path: Path) -> None:
    vae = tiny_vae("AutoencoderKLWan")
    vae.save_pretrained(tmp_path / "vae")
    latents = torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(each).view(1, 4, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    expected = vae.decode(latents * std + mean).sample.clamp(-1, 1)
    assert expected.shape == (3, 3, 5, 16, 16)
    gradients = []
    for rows, checkpoint in ((3, False), (1, False), (2, True)):
        given = latents.clone().requires_grad_()
        decoder = LatentDecoder(directory=str(tmp_path), rows=rows, checkpoint=checkpoint)
        found = pickle.loads(pickle.dumps(decoder)).decode(given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.square().sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-3, atol=1e-4)


# -- text --------------------------------------------------------------------------------------------------------------


def test_prompts_to_pixels_as_the_whole_pipeline_of_diffusers(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_sd3(source)
    spec = ModelSpec(task="flow", path=str(source))
    model = loaded(spec)
    changed = {key: each.detach() * 1.1 for key, each in model.named_parameters()}
    LIBRARY.write(model, spec, changed, tmp_path / "trained")
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "trained", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    x = noise("SD3Transformer2DModel")
    prompts = ["a red circle", "a blue circle"]
    expected = pipe(
        prompts, latents=x, num_inference_steps=3, guidance_scale=1.0, output_type="np", height=16, width=16
    ).images
    trained = loaded(ModelSpec(task="flow", path=str(tmp_path / "trained")))
    encoder = PromptEncoder(model=trained.description, cache=ArrayCache(tmp_path / "cache"), dtype="fp32")
    rows = encoder.encode(prompts)
    given = {name: torch.stack([torch.from_numpy(each[name]) for each in rows]) for name in rows[0]}
    latents = ode(trained, x, pipe.scheduler.sigmas, given)
    images = to_uint8(LatentDecoder(directory=str(tmp_path / "trained")).decode(latents))
    assert images.shape == (2, 16, 16, 3)
    assert abs(images.astype(int) - (expected * 255).round().astype(int)).max() <= 1


def test_embeddings_are_cached_until_their_inputs_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_sd3(tmp_path / "model")
    loads: list[int] = []
    original = PromptEncoder._load

    def counted(self: PromptEncoder, directory: Path) -> Any:
        loads.append(1)
        return original(self, directory)

    monkeypatch.setattr(PromptEncoder, "_load", counted)
    model = describe(ModelSpec(task="flow", path=str(tmp_path / "model")))
    encoder = PromptEncoder(model=model, cache=ArrayCache(tmp_path / "cache"), dtype="fp32")
    first = encoder.encode(["a red circle", "", "a red circle"])
    again = encoder.encode(["a red circle"])
    assert len(loads) == 1
    for name, each in first[0].items():
        assert np.array_equal(each, again[0][name])
        assert np.array_equal(each, first[2][name])
        assert not np.array_equal(each, first[1][name])
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    for damage in (lambda content: content[:50], lambda content: content[:-1] + bytes([content[-1] ^ 1])):
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        repaired = encoder.encode(["a red circle", ""])
        assert all(np.array_equal(each, first[0][name]) for name, each in repaired[0].items())
    assert len(loads) == 3
    encoder.encode(["a red circle"])
    assert len(loads) == 3  # repaired on disk
    replace(encoder, dtype="bf16").encode(["a red circle"])
    assert len(loads) == 4
    weights = tmp_path / "model" / "text_encoder" / "model.safetensors"
    os.utime(weights, (1, 1))
    encoder.encode(["a red circle"])
    assert len(loads) == 5
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_broken_text_encoder_is_named(tmp_path: Path) -> None:
    tiny_sd3(tmp_path)
    (tmp_path / "text_encoder" / "model.safetensors").write_bytes(b"?")
    model = describe(ModelSpec(task="flow", path=str(tmp_path)))
    with raises_error(ModelError, str(tmp_path)):
        PromptEncoder(model=model, cache=ArrayCache(tmp_path / "cache")).encode(["a"])
    with pytest.raises(ModelError):
        PromptEncoder(model=describe(spec_of("SD3Transformer2DModel")), cache=ArrayCache(tmp_path)).encode(["a"])


def test_an_unknown_encoder_device_is_named(tmp_path: Path) -> None:
    tiny_sd3(tmp_path)
    model = describe(ModelSpec(task="flow", path=str(tmp_path)))
    with raises_error(ModelError, "encoder_device", "nowhere"):
        PromptEncoder(model=model, cache=ArrayCache(tmp_path / "cache"), device="nowhere").encode(["a"])


def test_latents_of_images_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    encoder = ImageEncoder(
        decoder=LatentDecoder(directory=str(tmp_path), dtype="fp32"), cache=ArrayCache(tmp_path / "cache")
    )
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    first = encoder.encode(list(images))
    assert first[0].shape == (4, 4, 4)
    monkeypatch.setattr(LatentDecoder, "encode", None)
    assert all(np.array_equal(one, other) for one, other in zip(encoder.encode(list(images)), first, strict=True))
