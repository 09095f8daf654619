"""Conditioning without text encoders, pixels without a VAE, and the cache."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from roll_core.data.rows import read_rows
from roll_core.errors import DataError, ModelError, NonFiniteError
from roll_core.spec.config import DataArguments
from roll_core.spec.model import ModelSpec
from roll_pipeline_diffusion.cache import ArrayCache, files_identity, key_of
from roll_pipeline_diffusion.decoding import LatentDecoder, from_uint8, to_uint8
from roll_pipeline_diffusion.encoders import ImageEncoder, WordEncoder, given_conditioning
from roll_pipeline_diffusion.models.description import FlowDescription, describe
from roll_pipeline_diffusion.rows import folder_of
from roll_testing.errors import raises_error


def model(name: str = "SD3Transformer2DModel", **keys: Any) -> FlowDescription:
    sizes = {"joint_attention_dim": 16, "pooled_projection_dim": 12, "caption_channels": 16, "text_dim": 16}
    known = {key: each for key, each in sizes.items() if not name.startswith(("Wan", "Sana")) or "_dim" not in key}
    return describe(ModelSpec(task="flow", random_init={"_class_name": name, **known, **keys}))


# -- words -------------------------------------------------------------------------------------------------------------


def test_words_have_vectors_of_their_own_and_pool_to_their_sum() -> None:
    encoder = WordEncoder(model=model(), tokens=4)
    red_circle, red, circle, nothing = encoder.encode(["Red circle", "red", "circle", ""])
    assert red_circle["prompt_embeds"].shape == (4, 16)
    assert np.array_equal(red_circle["prompt_embeds"][0], red["prompt_embeds"][0])
    assert np.array_equal(red_circle["prompt_embeds"][1], circle["prompt_embeds"][0])
    assert not red_circle["prompt_embeds"][2:].any()
    total = red["pooled_prompt_embeds"] + circle["pooled_prompt_embeds"]
    assert red_circle["pooled_prompt_embeds"] == pytest.approx(total / np.sqrt(2), rel=1e-5)
    assert all(not each.any() for each in nothing.values())
    assert {each.dtype for each in red.values()} == {np.dtype(np.float32)}


def test_vectors_of_words_depend_on_the_seed_and_nothing_else() -> None:
    first, second = (WordEncoder(model=model(), seed=seed).encode(["red"])[0] for seed in (0, 1))
    again = pickle.loads(pickle.dumps(WordEncoder(model=model()))).encode(["blue", "red"])[1]
    assert np.array_equal(first["prompt_embeds"], again["prompt_embeds"])
    assert not np.array_equal(first["prompt_embeds"], second["prompt_embeds"])
    many = WordEncoder(model=model(joint_attention_dim=4096)).encode(["red"])[0]["prompt_embeds"][0]
    assert (many.mean(), many.std()) == pytest.approx((0, 1), abs=0.05)


def test_words_of_a_model_with_masks_and_guidance() -> None:
    masked = WordEncoder(model=model("QwenImageTransformer2DModel"), tokens=3).encode(["red circle", ""])
    assert masked[0]["prompt_embeds_mask"].tolist() == [True, True, False]
    assert masked[1]["prompt_embeds_mask"].tolist() == [True, False, False]
    flux = model("FluxTransformer2DModel", guidance_embeds=True)
    (guided,) = WordEncoder(model=flux, guidance=3.5).encode(["red"])
    assert guided["guidance"] == np.float32(3.5)
    assert guided["guidance"].shape == ()
    with raises_error(ModelError, "FluxTransformer2DModel"):
        WordEncoder(model=flux).encode(["red"])
    with raises_error(DataError, "3", "2"):
        WordEncoder(model=model(), tokens=2).encode(["a red circle"])


# -- conditioning of data files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_row_names_a_file_with_its_conditioning(suffix: str, tmp_path: Path) -> None:
    arrays = {"prompt_embeds": np.ones((3, 16), np.float16), "pooled_prompt_embeds": np.ones(12, np.float64)}
    if suffix == ".npz":
        np.savez(tmp_path / "row.npz", **arrays)
    else:
        save_file(arrays, tmp_path / "row.safetensors")
    row = {"cond": f"row{suffix}", "prompt": "a cat"}
    found = given_conditioning(row, model(), kind="cond", base=tmp_path, where="rows.jsonl:1")
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        "prompt_embeds": ((3, 16), np.float32),
        "pooled_prompt_embeds": ((12,), np.float32),
    }
    assert given_conditioning(row, model(), kind="uncond", base=tmp_path, where="rows.jsonl:1") == {}


def test_a_row_has_columns_with_arrays_and_files(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.ones((3, 16), np.float32))
    row = {"uncond.prompt_embeds": "text.npy", "uncond.prompt_embeds_mask": [1, 1, 0]}
    qwen = model("QwenImageTransformer2DModel")
    found = given_conditioning(row, qwen, kind="uncond", base=tmp_path, where="rows.jsonl:1")
    assert found["prompt_embeds"].shape == (3, 16)
    assert found["prompt_embeds_mask"].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"cond.prompt_embeds": [[0.0] * 16]}, ["cond", "pooled_prompt_embeds"]),
        ({"cond.prompt_embeds": [[0.0] * 15], "cond.pooled_prompt_embeds": [0.0] * 12}, ["prompt_embeds", 15, 16]),
        ({"cond.prompt_embeds": [[0.0] * 16], "cond.pooled_prompt_embeds": [[0.0] * 12]}, ["pooled_prompt_embeds"]),
        ({"cond.prompt_embeds": [[0.0], [0.0, 1.0]]}, ["cond.prompt_embeds"]),
        ({"cond.prompt_embeds": [["a"] * 16]}, ["cond.prompt_embeds"]),
        ({"cond.prompt_embeds": [[float("nan")] * 16]}, ["cond.prompt_embeds"]),
        ({"cond.guidance": 3.5}, ["guidance"]),
        ({"cond": "missing.npz"}, ["missing.npz"]),
        ({"cond": "row.pickle"}, ["row.pickle", ".npz"]),
        ({"cond": 3}, [3, ".npz"]),
        ({"cond": "broken.safetensors"}, ["broken.safetensors"]),
        ({"cond.prompt_embeds": "objects.npy"}, ["objects.npy"]),
    ],
)
def test_wrong_conditioning_of_a_row_is_located(row: dict[str, Any], facts: list[Any], tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"?")
    np.save(tmp_path / "objects.npy", np.array([print], object), allow_pickle=True)
    with raises_error(DataError, "rows.jsonl:7", *facts):
        given_conditioning(row, model(), kind="cond", base=tmp_path, where="rows.jsonl:7")


# -- cache -------------------------------------------------------------------------------------------------------------


def test_the_cache_returns_what_was_stored(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path / "cache")
    arrays = {"scalar": np.asarray(3.5, np.float32), "flags": np.ones(3, bool), "view": np.arange(6.0).reshape(2, 3).T}
    assert cache.get("key") is None
    cache.put("key", arrays)
    cache.put("key", arrays)
    found = cache.get("key")
    assert found is not None
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(each, arrays[name]) and each.dtype == arrays[name].dtype for name, each in found.items())
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["key.safetensors"]
    assert key_of(a=1, b=[2]) == key_of(b=[2], a=1) != key_of(a=1, b=[3])


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ArrayCache(tmp_path).put("key", {"a": np.ones(2)})
    assert list(tmp_path.iterdir()) == []


def test_config_files_are_identified_by_content_weights_by_stat(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_bytes(b"12")
    first = files_identity(tmp_path, ["vae"])
    (folder / "config.json").touch()
    assert files_identity(tmp_path, ["vae"]) == first
    (folder / "config.json").write_text("[]")
    changed = files_identity(tmp_path, ["vae"])
    (folder / "weights.safetensors").write_bytes(b"123")
    assert len({first, changed, files_identity(tmp_path, ["vae"]), files_identity(tmp_path, [])}) == 4


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_pixels_are_rounded_to_bytes_and_back() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    assert np.array_equal(to_uint8(from_uint8(levels)), levels)
    pixels = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]).view(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]
    video = torch.zeros(2, 3, 4, 5, 6)
    video[:, 0] = 1
    assert to_uint8(video).shape == (2, 4, 5, 6, 3)
    assert to_uint8(video)[1, 3, 2, 1].tolist() == [255, 128, 128]


def test_pixels_that_are_not_finite_are_an_error_with_their_rows() -> None:
    pixels = torch.zeros(3, 3, 2, 2)
    pixels[1, 0, 0, 0] = float("nan")
    with raises_error(NonFiniteError, "[1]"):
        to_uint8(pixels)


def test_without_a_vae_latents_are_pixels(tmp_path: Path) -> None:
    decoder = LatentDecoder()
    latents = torch.tensor([-2.0, 0.5]).view(1, 1, 1, 2).repeat(1, 3, 1, 1).requires_grad_()
    assert decoder.decode(latents)[0, 0, 0].tolist() == [-1.0, 0.5]
    decoder.decode(latents).sum().backward()
    assert latents.grad is not None
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    (encoded,) = ImageEncoder(decoder=decoder, cache=ArrayCache(tmp_path)).encode([image])
    assert np.array_equal(to_uint8(decoder.decode(torch.from_numpy(np.array(encoded))[None]))[0], image)
    for wrong in (torch.zeros(1, 4, 2, 2), torch.zeros(3, 2, 2)):
        with raises_error(DataError, 3):
            decoder.decode(wrong)
    with raises_error(DataError, "float64"):
        ImageEncoder(decoder=decoder, cache=ArrayCache(tmp_path)).encode([np.zeros((4, 4, 3))])


def test_a_directory_without_a_vae_is_refused(tmp_path: Path) -> None:
    with raises_error(ModelError, str(tmp_path)):
        LatentDecoder(directory=str(tmp_path)).decode(torch.zeros(1, 4, 2, 2))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "VQModel"}')
    with raises_error(ModelError, "VQModel", "AutoencoderKL"):
        LatentDecoder(directory=str(tmp_path)).decode(torch.zeros(1, 4, 2, 2))


def test_files_of_a_row_are_in_the_folder_of_its_own_file(tmp_path: Path) -> None:
    names = [str(tmp_path / folder / "rows.jsonl") for folder in ("a", "b")]
    for name in names:
        Path(name).parent.mkdir()
        Path(name).write_text('{"prompt": "x"}\n', encoding="utf-8")
    data = DataArguments(file_name=names)
    assert [folder_of(row, data) for row in read_rows(data)] == [tmp_path / "a", tmp_path / "b"]
