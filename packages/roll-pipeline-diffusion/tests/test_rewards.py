"""Rewards of images: values, gradients, failures, and mistakes of users."""

from __future__ import annotations

import base64
import importlib
import io
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from roll_core.errors import ConfigError, ContractError, DataError, ModelError, UnsupportedError
from roll_core.spec.config import RewardConfig
from roll_core.spec.module_program import ModuleBatch
from roll_core.spec.providers import RewardProvider
from roll_pipeline_diffusion import plugin
from roll_pipeline_diffusion.rewards import config as schemas
from roll_pipeline_diffusion.rewards.base import DifferentiableReward, DifferentiableRewards, ImageRewards
from roll_pipeline_diffusion.rewards.function import edit_distance
from roll_pipeline_diffusion.rewards.pixels import BrightnessReward
from roll_testing.errors import mentions, raises_error


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def score(config: RewardConfig, images: np.ndarray, rows: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    rows = rows or [{}] * len(images)
    return ImageRewards({"look": config}).score(images, ["a cat"] * len(images), rows)["look"]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes functions of a user to a module; returns its name."""
    monkeypatch.chdir(tmp_path)
    count = iter(range(100))

    def write(source: str) -> str:
        name = f"image_rewards_{tmp_path.name}_{next(count)}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


# -- values ------------------------------------------------------------------------------------------------------------


def test_brightness_is_the_mean_luminance() -> None:
    image = np.zeros((3, 2, 2, 3), np.uint8)
    image[0, 0, 0] = 255  # one white pixel of four
    image[1] = (0, 255, 0)
    found = score(schemas.BrightnessConfig(reward="image_brightness"), image)
    assert [each.value for each in found] == pytest.approx([0.25, 0.7152, 0.0])


def test_color_is_one_minus_the_distance_to_the_color_of_the_row() -> None:
    image = np.zeros((2, 2, 2, 3), np.uint8)
    image[:, :, :, 0] = 255
    config = schemas.ColorConfig(reward="image_color")
    found = score(config, image, [{"color": [1.0, 0.0, 0.0]}, {"color": [0.0, 0.0, 0.6]}])
    assert [each.value for each in found] == pytest.approx([1.0, 1 - (1 + 0.6) / 3])
    fixed = schemas.ColorConfig(reward="image_color", color=[1.0, 0.0, 0.0])
    assert [each.value for each in score(fixed, image)] == pytest.approx([1.0, 1.0])
    for wrong in ([1.0, 0.0], [2.0, 0.0, 0.0], "red", None):
        with raises_error(DataError, "rewards.look", "color"):
            score(config, image, [{"color": wrong}] * 2)


def test_jpeg_size_is_the_length_of_the_file_in_kb() -> None:
    images = np.stack([noise(32, 32, 3), np.zeros((32, 32, 3), np.uint8)])
    found = [each.value for each in score(schemas.JpegSizeConfig(reward="jpeg_size"), images)]
    expected = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=95)
        expected.append(len(file.getvalue()) / 1000)
    assert found == expected
    assert found[0] > 2 * found[1]


def test_videos_are_scored_by_frame_or_together(functions: Callable[[str], str]) -> None:
    video = np.zeros((2, 3, 2, 2, 3), np.uint8)
    video[0, 0] = 255
    video[1, :2] = 255
    found = score(schemas.BrightnessConfig(reward="image_brightness"), video)
    assert [each.value for each in found] == pytest.approx([1 / 3, 2 / 3])
    name = functions("def shape(images, prompts, rows):\n    return [float(images.ndim)] * len(images)\n")
    for frames, dimensions in (("mean", 4), ("together", 5)):
        config = schemas.ImageFunctionConfig(
            reward="image_function",
            function=f"{name}:shape",
            frames=frames,  # type: ignore[arg-type]
        )
        assert [each.value for each in score(config, video)] == [dimensions] * 2
    with pytest.raises(ValidationError):
        schemas.BrightnessConfig(reward="image_brightness", frames="together")


def test_a_video_with_a_failed_frame_has_failed(functions: Callable[[str], str]) -> None:
    name = functions(
        "def f(images, prompts, rows):\n"
        "    values = [float(each.max()) for each in images]\n"
        "    return [{'value': each, 'size': 2} if each else {'failure': 'dark'} for each in values]\n"
    )
    video = np.full((2, 2, 2, 2, 3), 100, np.uint8)
    video[1, 1] = 0
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f")
    first, second = score(config, video)
    assert (first.value, first.detail) == (100.0, {"size": 2.0})
    assert second.failed
    assert mentions(second.failure, "dark")


def test_text_is_compared_by_edit_distance(functions: Callable[[str], str]) -> None:
    name = functions("def read(image):\n    return 'Hel lo wrld' if image.max() else ''\n")
    config = schemas.ImageTextConfig(reward="image_text", reader=f"{name}:read")
    images = np.stack([np.full((2, 2, 3), 255, np.uint8), np.zeros((2, 2, 3), np.uint8)])
    rewards = ImageRewards({"text": config})
    found = rewards.score(images, ['a sign "Hello World"', "a sign"], [{}, {"text": "abcd"}])["text"]
    assert [each.value for each in found] == pytest.approx([0.9, 0.0])  # one of ten letters is missing
    with raises_error(DataError, "rewards.text", "text"):
        rewards.score(images, ["a sign", "a sign"], [{}, {}])


def test_default_text_reader_names_the_missing_library(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "rapidocr" else name)
    (key, problem), *others = schemas.ImageTextConfig(reward="image_text").check_code(None, 60).items()
    assert (key, others) == ("reader", [])
    assert mentions(problem, "rapidocr", "roll-pipeline-diffusion[ocr]")
    assert not mentions(problem, "onnxruntime")


def test_edit_distance_is_the_shortest_sequence_of_edits() -> None:
    def slow(one: str, other: str) -> int:
        if not one or not other:
            return len(one) + len(other)
        same = slow(one[1:], other[1:]) + (one[0] != other[0])
        return min(same, slow(one[1:], other) + 1, slow(one, other[1:]) + 1)

    generator = np.random.default_rng(0)
    for _ in range(30):
        one, other = ("".join(generator.choice(list("ab"), generator.integers(0, 6))) for _ in range(2))
        assert edit_distance(one, other) == slow(one, other)
    assert edit_distance("kitten", "sitting") == 3


# -- CLIP --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("clip")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 6, "max_position_embeddings": 6, "eos_token_id": 1, "bos_token_id": 1},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "cat": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


def test_clip_score_is_that_of_transformers(clip: Path) -> None:
    from transformers import AutoTokenizer, CLIPModel

    images = noise(2, 8, 8, 3)
    config = schemas.ClipScoreConfig(reward="clip_score", model_name_or_path=str(clip), logits=True)
    rewards = ImageRewards({"clip": config})
    found = rewards.score(images, ["a cat", "a dog"], [{}, {}])["clip"]
    model, tokenizer = CLIPModel.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((torch.from_numpy(images).float() / 255 - mean) / std).movedim(-1, 1)
    with torch.no_grad():
        logits = model(**tokenizer(["a cat", "a dog"], return_tensors="pt"), pixel_values=pixels).logits_per_image
    assert [each.value for each in found] == pytest.approx(logits.diagonal().tolist(), rel=1e-4)
    larger = rewards.score(noise(1, 16, 24, 3), ["a cat"], [{}])["clip"]
    assert np.isfinite(larger[0].value)


def test_an_aesthetic_head_is_a_stack_of_linear_layers(clip: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    # As LAION stores it: dropout between the layers leaves gaps in the numbers, which are not in the order of text.
    state = {
        "layers.2.weight": torch.randn(3, 5, generator=generator), "layers.2.bias": torch.ones(3),
        "layers.10.weight": torch.randn(1, 3, generator=generator), "layers.10.bias": torch.ones(1),
    }  # fmt: skip
    torch.save(state, tmp_path / "head.pth")
    images = noise(2, 8, 8, 3)
    config = schemas.AestheticConfig(reward="aesthetic", model_name_or_path=str(clip), head=str(tmp_path / "head.pth"))
    rewards = ImageRewards({"look": config})
    reward: Any = rewards.reward("look")
    features = reward.embed(torch.from_numpy(images).float().movedim(-1, 1) / 255).numpy()
    assert np.linalg.norm(features, axis=1) == pytest.approx([1, 1])
    weights = {name: each.numpy() for name, each in state.items()}
    hidden = features @ weights["layers.2.weight"].T + 1
    expected = hidden @ weights["layers.10.weight"].T + 1
    found = rewards.score(images, ["", ""], [{}, {}])["look"]
    assert [each.value for each in found] == pytest.approx(expected[:, 0].tolist(), rel=1e-4)
    torch.save({"layers.0.weight": torch.ones(1, 4), "layers.0.bias": torch.ones(1)}, tmp_path / "head.pth")
    with raises_error(ModelError, "head.pth", "4", "5"):
        ImageRewards({"look": config}).reward("look")
    (tmp_path / "head.pth").write_bytes(pickle.dumps(print))
    with raises_error(ModelError, "head.pth"):
        ImageRewards({"look": config}).reward("look")


def test_a_missing_clip_model_is_named(tmp_path: Path) -> None:
    config = schemas.ClipScoreConfig(reward="clip_score", model_name_or_path=str(tmp_path / "none"))
    with raises_error(ModelError, str(tmp_path / "none")):
        score(config, noise(1, 8, 8, 3))


# -- gradients ---------------------------------------------------------------------------------------------------------


def batch_of(rewards: DifferentiableRewards, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> ModuleBatch:
    arrays = [rewards.row_arrays(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
    tensors = {name: torch.from_numpy(np.stack([each[name] for each in arrays])) for name in arrays[0]}
    return ModuleBatch(ids=tuple("ab"), tensors=tensors)


def test_weighted_sum_has_values_and_gradients_of_the_images(clip: Path, functions: Callable[[str], str]) -> None:
    name = functions("def close(pixels, columns):\n    return -(pixels.mean((1, 2, 3)) - columns['level']) ** 2\n")
    configs: dict[str, RewardConfig] = {
        "bright": schemas.BrightnessConfig(reward="image_brightness", weight=2.0),
        "red": schemas.ColorConfig(reward="image_color", color=[1.0, 0.0, 0.0], weight=-0.5),
        "clip": schemas.ClipScoreConfig(reward="clip_score", model_name_or_path=str(clip)),
        "own": schemas.ImageFunctionConfig(
            reward="image_function", function=f"{name}:close", differentiable=True, numbers=["level"]
        ),
    }
    rewards = ImageRewards(configs)
    differentiable = pickle.loads(pickle.dumps(DifferentiableRewards(rewards)))
    images, prompts, rows = noise(2, 8, 8, 3), ["a cat", "a dog"], [{"level": 0.2}, {"level": 0.7}]
    batch = batch_of(differentiable, prompts, rows)
    pixels = (torch.from_numpy(images).float().movedim(-1, 1) / 127.5 - 1).requires_grad_()
    values = differentiable(pixels, batch)
    scored = rewards.score(images, prompts, rows)
    expected = [sum(configs[key].weight * each[at].value for key, each in scored.items()) for at in range(2)]
    assert values.tolist() == pytest.approx(expected, rel=1e-4)
    (gradient,) = torch.autograd.grad(values.sum(), pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    step = 1e-2
    with torch.no_grad():
        above, below = (differentiable(pixels + sign * step * direction, batch).sum() for sign in (1, -1))
    assert float((gradient * direction).sum()) == pytest.approx(float((above - below) / (2 * step)), rel=0.05, abs=1e-3)


def test_process_loads_rewards_once_for_all_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    monkeypatch.setattr(BrightnessReward, "load", lambda self, device: loads.append(device))
    rewards = ImageRewards({"bright": schemas.BrightnessConfig(reward="image_brightness")})
    sent = pickle.dumps(DifferentiableRewards(rewards))
    for _ in range(3):
        found = pickle.loads(sent)(torch.zeros(2, 3, 4, 4, requires_grad=True), ModuleBatch(ids=("a", "b"), tensors={}))
        assert found.tolist() == pytest.approx([0.5, 0.5])
    rewards.score(np.zeros((1, 4, 4, 3), np.uint8), [""], [{}])
    assert loads == ["cpu"]
    ImageRewards(rewards.configs).reward("bright")  # another run loads its own
    assert len(loads) == 2


def test_gradients_of_a_video_are_those_of_its_frames() -> None:
    rewards = DifferentiableRewards(ImageRewards({"bright": schemas.BrightnessConfig(reward="image_brightness")}))
    pixels = torch.zeros(2, 3, 4, 2, 2, requires_grad=True)
    values = rewards(pixels, ModuleBatch(ids=("a", "b"), tensors={}))
    assert values.tolist() == pytest.approx([0.5, 0.5])
    values.sum().backward()
    assert pixels.grad is not None
    assert float(pixels.grad[0].sum()) == pytest.approx(0.5)  # of a luminance of (pixel / 2 + 0.5)


@pytest.mark.parametrize(
    "body",
    ["pixels.mean()", "pixels.detach().mean((1, 2, 3))", "[1.0, 2.0]", "pixels.mean((1, 2, 3)) / 0", "1 / 0"],
)
def test_a_wrong_differentiable_function_is_named(body: str, functions: Callable[[str], str]) -> None:
    name = functions(f"def f(pixels, columns):\n    return {body}\n")
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f", differentiable=True)
    rewards = DifferentiableRewards(ImageRewards({"own": config}))
    with raises_error(ContractError, "rewards.own", f"{name}:f"):
        rewards(torch.ones(2, 3, 2, 2, requires_grad=True), ModuleBatch(ids=("a", "b"), tensors={}))


@pytest.mark.parametrize("body", ["pixels.mean()", "[1.0, 2.0]"])
def test_wrong_differentiable_function_is_named_in_evaluations(body: str, functions: Callable[[str], str]) -> None:
    name = functions(f"def f(pixels, columns):\n    return {body}\n")
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f", differentiable=True)
    with raises_error(ContractError, "rewards.look", f"{name}:f"):
        score(config, noise(2, 2, 2, 3))


def test_many_images_are_scored_a_few_at_a_time(functions: Callable[[str], str]) -> None:
    name = functions(
        "sizes = []\n"
        "def f(pixels, columns):\n    sizes.append(len(pixels))\n    return columns['place'] + len(pixels) * 0\n"
    )
    config = schemas.ImageFunctionConfig(
        reward="image_function", function=f"{name}:f", differentiable=True, numbers=["place"]
    )
    found = score(config, noise(40, 2, 2, 3), [{"place": place} for place in range(40)])
    assert [each.value for each in found] == list(range(40))
    assert importlib.import_module(name).sizes == [16, 16, 8]


def test_a_column_without_numbers_is_refused(functions: Callable[[str], str]) -> None:
    name = functions("def f(pixels, columns):\n    return pixels.mean((1, 2, 3))\n")
    config = schemas.ImageFunctionConfig(
        reward="image_function", function=f"{name}:f", differentiable=True, numbers=["level"]
    )
    rewards = DifferentiableRewards(ImageRewards({"own": config}))
    for row in ({}, {"level": "high"}, {"level": float("nan")}):
        with raises_error(DataError, "rewards.own", "level"):
            rewards.row_arrays("a cat", row)


# -- functions of users ------------------------------------------------------------------------------------------------


def test_a_function_returns_numbers_rewards_or_dicts(functions: Callable[[str], str]) -> None:
    name = functions(
        "import numpy\nfrom roll_core.types import Reward\n"
        "def f(images, prompts, rows):\n"
        "    assert images.dtype == numpy.uint8\n"
        "    return [numpy.float32(1), Reward(value=2.0), {'value': 3, 'share': 0.5}, {'failure': 'no'}, float('nan'),"
        " rows[5]['x']]\n"
    )
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f")
    found = score(config, noise(6, 2, 2, 3), [{}] * 5 + [{"x": 7}])
    assert [each.value for each in found] == [1.0, 2.0, 3.0, None, None, 7.0]
    assert found[2].detail == {"share": 0.5}
    assert mentions(found[3].failure, "rewards.look", f"{name}:f", "no")
    assert mentions(found[4].failure, "nan")


@pytest.mark.parametrize("body", ["1.0", "[1.0]", "None", "['good', 'bad']", "[[1], [2]]"])
def test_a_function_with_a_wrong_result_is_named(body: str, functions: Callable[[str], str]) -> None:
    name = functions(f"def f(images, prompts, rows):\n    return {body}\n")
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f")
    with raises_error(ContractError, "rewards.look", f"{name}:f"):
        score(config, noise(2, 2, 2, 3))


def test_evaluation_of_a_differentiable_function_has_a_timeout(functions: Callable[[str], str]) -> None:
    name = functions("import time\ndef hang(pixels, columns):\n    time.sleep(5)\n")
    config = schemas.ImageFunctionConfig(
        reward="image_function", function=f"{name}:hang", differentiable=True, timeout_s=0.1
    )
    begun = time.monotonic()
    (found,) = score(config, noise(1, 2, 2, 3))
    assert time.monotonic() - begun < 4
    assert mentions(found.failure, f"{name}:hang", "timeout_s")


def test_a_function_that_raises_or_hangs_fails_its_images(functions: Callable[[str], str]) -> None:
    name = functions(
        "import time\ndef bad(images, prompts, rows):\n    raise RuntimeError('broken')\n"
        "def leave(images, prompts, rows):\n    raise SystemExit(3)\n"
        "def hang(images, prompts, rows):\n    time.sleep(5)\n"
    )
    for function, facts in (("bad", ["RuntimeError", "broken"]), ("leave", ["SystemExit"]), ("hang", ["timeout_s"])):
        config = schemas.ImageFunctionConfig(
            reward="image_function", function=f"{name}:{function}", timeout_s=0.1 if function == "hang" else 60.0
        )
        begun = time.monotonic()
        found = score(config, noise(2, 2, 2, 3))
        assert time.monotonic() - begun < 4
        assert all(each.failed and mentions(each.failure, f"{name}:{function}", *facts) for each in found)


@pytest.mark.parametrize(
    ("source", "function"),
    [
        ("", "missing"),
        ("def f(image):\n    return 1\n", "f"),
        ("async def f(images, prompts, rows):\n    return []\n", "f"),
        ("f = 3\n", "f"),
        ("raise SystemExit\n", "f"),
    ],
)
def test_a_function_that_cannot_be_called_is_a_config_error(
    source: str, function: str, functions: Callable[[str], str]
) -> None:
    name = functions(source)
    config = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:{function}")
    with raises_error(ConfigError, f"{name}:{function}", key="function"):
        ImageRewards({"look": config}).reward("look")


def test_checks_find_what_is_missing_before_a_run(functions: Callable[[str], str], tmp_path: Path) -> None:
    name = functions("def f(images, prompts, rows):\n    return []\n\ndef g(pixels):\n    return pixels\n")
    good = schemas.ImageFunctionConfig(reward="image_function", function=f"{name}:f")
    assert good.check_code(None, 60.0) == {}
    wrong = schemas.ImageFunctionConfig(
        reward="image_function", function=f"{name}:g", differentiable=True, numbers=["level"]
    )
    assert mentions(wrong.check_code({"level"}, 60.0)["function"], f"{name}:g")
    assert mentions(wrong.check_code({"other"}, 60.0)["numbers"], "level", "other")
    reader = schemas.ImageTextConfig(reward="image_text", reader=f"{name}:missing")
    assert mentions(reader.check_code(None, 60.0)["reader"], f"{name}:missing")
    leaves = schemas.ImageTextConfig(reward="image_text", reader=f"{functions('import os; os._exit(3)')}:f")
    assert mentions(leaves.check_code(None, 60.0)["reader"], "3")
    slow = schemas.ImageTextConfig(reward="image_text", reader=f"{functions('import time; time.sleep(60)')}:f")
    with raises_error(TimeoutError, slow.reader):
        slow.check_code(None, 0.2)
    clip = schemas.AestheticConfig(reward="aesthetic", model_name_or_path=str(tmp_path), head=str(tmp_path / "head"))
    assert set(clip.check_code(None, 1.0)) == {"model_name_or_path", "head"}
    assert set(http("http://x", row_columns=["label"]).check_code({"other"}, 1.0)) == {"row_columns"}


# -- endpoints ---------------------------------------------------------------------------------------------------------


@contextmanager
def endpoint(reply: Callable[[BaseHTTPRequestHandler, Any], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with suppress(BrokenPipeError, ConnectionResetError):
                reply(self, json.loads(body))

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def http(url: str, **keys: Any) -> schemas.ImageHttpConfig:
    return schemas.ImageHttpConfig(reward="image_http", url=url, **keys)


def test_an_endpoint_gets_images_prompts_and_columns() -> None:
    messages, keys = [], []

    def reply(handler: BaseHTTPRequestHandler, message: Any) -> None:
        messages.append(message)
        keys.append(handler.headers["Authorization"])
        first = [1, {"value": 0.5, "detail": {"sharp": 2.0}}]
        send(handler, {"scores": first if len(messages) == 1 else [{"failure": "no face"}]})

    images = noise(3, 4, 5, 3)
    with endpoint(reply) as url:
        config = http(url, batch_size=2, row_columns=["label"], api_key="secret")
        found = score(config, images, [{"label": place, "other": 1} for place in range(3)])
    assert [each.value for each in found] == [1.0, 0.5, None]
    assert found[1].detail == {"sharp": 2.0}
    assert mentions(found[2].failure, "face")
    assert [each["rows"] for each in messages] == [[{"label": 0}, {"label": 1}], [{"label": 2}]]
    assert keys == ["Bearer secret"] * 2
    sent = [Image.open(io.BytesIO(base64.b64decode(each))) for message in messages for each in message["images"]]
    assert all(np.array_equal(np.asarray(one), other) for one, other in zip(sent, images, strict=True))


def test_an_endpoint_gets_videos_as_lists_of_frames() -> None:
    shapes: list[Any] = []

    def reply(handler: BaseHTTPRequestHandler, message: Any) -> None:
        shapes.append([len(each) for each in message["images"]])
        send(handler, {"scores": [1, 2]})

    with endpoint(reply) as url:
        found = score(http(url, frames="together"), noise(2, 3, 4, 4, 3))
    assert shapes == [[3, 3]]
    assert [each.value for each in found] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "status", "requests"),
    [
        (b"not JSON", 200, 1),
        ({"scores": [1]}, 200, 1),
        ({"value": 1}, 200, 1),
        ([1, 2], 200, 1),
        ({"scores": ["good", None]}, 200, 1),
        ({"scores": [True, {"value": "1"}]}, 200, 1),
        (b'{"scores": [NaN, Infinity]}', 200, 1),
        (b"x" * ((4 << 20) + 1), 200, 1),
        (b"gone", 404, 1),
        (b"busy", 503, 3),
    ],
)
def test_a_wrong_reply_is_a_failure(content: Any, status: int, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_pipeline_diffusion.rewards import http as module

    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    count: list[int] = []

    def reply(handler: BaseHTTPRequestHandler, message: Any) -> None:
        count.append(1)
        send(handler, content, status)

    with endpoint(reply) as url:
        found = score(http(url), noise(2, 2, 2, 3))
    assert all(each.failed and each.failure for each in found)
    assert len(count) == requests


def cut_in_a_chunk(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{")


def cut_in_the_body(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


def no_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"busy\r\n")


def cut_in_an_error(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{")


@pytest.mark.parametrize("broken", [cut_in_a_chunk, cut_in_the_body, no_http, cut_in_an_error])
def test_broken_connection_is_retried_and_fails_its_images_only(broken, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_pipeline_diffusion.rewards import http as module

    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    places: list[int] = []

    def reply(handler: BaseHTTPRequestHandler, message: Any) -> None:
        place = message["rows"][0]["place"]
        places.append(place)
        if place == 1 or (place == 0 and places == [0]):
            broken(handler)
        else:
            send(handler, {"scores": [place]})

    with endpoint(reply) as url:
        config = http(url, batch_size=1, row_columns=["place"], max_retries=1)
        found = score(config, noise(3, 2, 2, 3), [{"place": place} for place in range(3)])
    assert [each.value for each in found] == [0.0, None, 2.0]
    assert places == [0, 0, 1, 1, 2]


def test_a_slow_endpoint_is_a_failure_within_the_timeout() -> None:
    def reply(handler: BaseHTTPRequestHandler, message: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):  # a byte now and then: no single read takes long
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)

    with endpoint(reply) as url:
        begun = time.monotonic()
        found = score(http(url, timeout_s=0.2, max_retries=0), noise(1, 2, 2, 3))
    assert found[0].failed
    assert mentions(found[0].failure, "0.2")
    assert time.monotonic() - begun < 5


# -- the hook ----------------------------------------------------------------------------------------------------------


def test_every_reward_of_the_hook_has_the_target_of_its_schema() -> None:
    for provider in plugin.roll_rewards():
        assert isinstance(provider, RewardProvider)
        module, _, name = str(provider.config).partition(":")
        assert module == schemas.__name__
        schema = getattr(schemas, name)
        assert schema.target == provider.target
        kind = resolve_name(provider.target)
        optional = provider.name == "image_function"
        assert issubclass(kind, DifferentiableReward) == (optional or schema.model_construct().has_gradients)
        assert schema.model_fields["reward"].annotation.__args__ == (provider.name,)


ANY = {"tag_included": ["a"], "processes": 2, "start_timeout_s": 1.0, "device_mapping": (0,), "world_size": 2}


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"reward": "image_brightness"}, {**ANY, "timeout_s": 1.0, "max_retries": 0}),
        ({"reward": "jpeg_size"}, {**ANY, "timeout_s": 1.0, "max_retries": 0}),
        ({"reward": "image_function", "function": "mine:f"}, {**ANY, "max_retries": 0}),
        ({"reward": "image_http", "url": "http://x"}, ANY),
    ],
)
def test_keys_that_an_image_reward_does_not_read_are_refused(given: Any, keys: Any) -> None:
    provider = next(each for each in plugin.roll_rewards() if each.name == given["reward"])
    schema = resolve_name(str(provider.config))
    saved = schema(**given).model_dump()
    assert schema(**saved) == schema(**given)
    for key, value in keys.items():
        with pytest.raises(ValidationError) as caught:
            schema(**given, **{key: value})
        assert mentions(str(caught.value), key)


def test_a_reward_of_images_scores_no_text() -> None:
    reward = ImageRewards({"look": schemas.BrightnessConfig(reward="image_brightness")}).reward("look")
    with raises_error(UnsupportedError, "image_brightness", "reward_flow"):
        reward.start()


def test_no_images_have_no_rewards() -> None:
    assert score(schemas.BrightnessConfig(reward="image_brightness"), np.zeros((0, 2, 2, 3), np.uint8)) == []
