"""Rewards of samples with images: functions get Pillow's images, judges and services get messages with them."""

from __future__ import annotations

import base64
import io
from contextlib import nullcontext
from dataclasses import replace

import pytest
from PIL import Image

from roll_core.data.media import image_media, with_parts
from roll_core.errors import DataError
from roll_core.spec.rollout import IMAGE
from roll_rewards.config import JudgeModelConfig
from roll_rewards.function import FunctionReward
from roll_rewards.function_config import FunctionConfig
from roll_rewards.judges import JudgeModelReward
from roll_testing.errors import raises_error

ROLL = """
def f(prompt, response, images, answer=None):
    assert all(image.mode == "RGB" for image in images)
    return float(sum(image.width for image in images))
"""
TRL = """
def f(completions, images, **columns):
    return [float(sum(image.width for image in of_sample)) for of_sample in images]
"""
MESSAGES = """
def f(completions, prompts, chat, images):
    ((message,),) = prompts
    assert [part.get("text") or part["type"] for part in message["content"]] == ["see ", "image", "?", "image"]
    return [1.0]
"""
ALL_COLUMNS = "def f(prompt, response, **columns): return float(sorted(columns) == ['answer'])"
RED, BLUE = (image_media(Image.new("RGB", (width, 3), colour)) for width, colour in ((5, "red"), (7, "blue")))


@pytest.fixture
def seen(asking):
    """A request with two images, and columns."""

    def make(*images, **columns):
        request = asking("4", **columns)
        content = f"see {IMAGE}?{IMAGE}" if images else "see ?"
        message = {"role": "user", "content": content, **({"media": images} if images else {})}
        return replace(request, sample=replace(request.sample, media=images), messages=[message])

    return make


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize(
    ("source", "images", "columns", "expected"),
    [
        (ROLL, (RED, BLUE), {"answer": 1}, 12.0),
        (ROLL, (), {"answer": 1}, 0.0),
        (TRL, (RED, BLUE), {}, 12.0),
        (TRL, (), {}, 0.0),
        (MESSAGES, (RED, BLUE), {"chat": [{"role": "user", "content": ""}]}, 1.0),
        (ALL_COLUMNS, (RED, BLUE), {"answer": 1}, 1.0),
        ("def f(prompt, response, images): return float(images == 3)", (), {"images": 3}, 1.0),
    ],
)
def test_functions_that_name_images_get_them(user_module, seen, isolation, source, images, columns, expected):
    config = FunctionConfig(reward="function", function=f"{user_module(source)}:f", isolation=isolation)
    reward = FunctionReward(config)
    reward.start()
    try:
        assert reward.score(seen(*images, **columns)).value == expected
    finally:
        reward.close()


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("source", [ALL_COLUMNS, ROLL])
def test_images_are_read_for_functions_that_name_them(user_module, seen, tmp_path, isolation, source):
    gone = replace(RED, path=str(tmp_path / "gone.png"))
    config = {"reward": "function", "function": f"{user_module(source)}:f", "isolation": isolation}
    reward = FunctionReward(FunctionConfig(**config))
    reward.start()
    try:
        with raises_error(DataError, "gone.png") if source == ROLL else nullcontext():
            assert reward.score(seen(gone, RED, answer=1)).value == 1.0
    finally:
        reward.close()


def test_functions_with_images_need_no_column_of_that_name(user_module):
    config = FunctionConfig(reward="function", function=f"{user_module(ROLL)}:f")
    assert config.check_code({"answer"}, 60) == {}


@pytest.mark.parametrize(
    ("judge_prompt", "content", "media"),
    [
        ("Q: {prompt} A: {response}", f"Q: see {IMAGE}?{IMAGE} A: 4", (RED, BLUE)),
        ("{prompt}{prompt}{response}", f"see {IMAGE}?{IMAGE}" * 2 + "4", (RED, BLUE) * 2),
        ("Is {response} right?", "Is 4 right?", None),
    ],
)
def test_judges_see_the_images_of_the_prompt(seen, judge_prompt, content, media):
    config = JudgeModelConfig(
        reward="judge_model", judge_prompt=judge_prompt, strategy_args={"strategy_name": "hf_infer"}
    )
    request = replace(seen(RED, BLUE), response="4" + IMAGE * ("{prompt}" in judge_prompt))
    (message,) = JudgeModelReward(config).messages(request)
    assert (message["content"], message.get("media")) == (content, media)


def test_services_get_images_as_data_urls():
    message = {"role": "user", "content": f"see {IMAGE}?", "media": (RED,)}
    (sent,) = with_parts([message], data=True)
    text, image, end = sent["content"]
    assert (text, end) == ({"type": "text", "text": "see "}, {"type": "text", "text": "?"})
    kind, _, data = image["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (5, 3)
    assert with_parts([{"role": "user", "content": "text"}], data=True) == [{"role": "user", "content": "text"}]
