"""Requests that make no sense to any engine are refused in words."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_core.data.media import image_media
from roll_core.data.processor import processor_of
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.infer import check_request
from roll_core.types import GenerateRequest, SamplingParams
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, IMAGE_TOKEN, write_processor
from shared_tests.tiny_vision import picture


def request(prompt=(1, 2, 3), n=1, prompt_topk=0, **params):
    return GenerateRequest(
        id="r",
        prompt_ids=np.asarray(prompt),
        n=n,
        prompt_topk=prompt_topk,
        params=SamplingParams(**{"max_new_tokens": 4, **params}),
    )


def check(asked, **given):
    check_request(asked, vocab_size=40, max_tokens=8, limit="the model's 8 positions", **given)


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        (request(prompt=np.zeros(0, np.int64)), ("prompt",)),
        (request(prompt=(0.5, 1.0)), ("integers",)),
        (request(prompt=(1, 40)), ("token 1", "40")),
        (request(prompt=(-1,)), ("token 0", "-1")),
        (request(n=0), ("n", "0")),
        (request(prompt_topk=-1), ("prompt_topk", "-1")),
        (request(prompt_topk=41), ("prompt_topk", "41", "40")),
        (request(max_new_tokens=-1), ("max_new_tokens", "-1")),
        (request(max_new_tokens=6), ("3", "max_new_tokens", "6", "9", "8")),
        (request(stop_token_ids=(40,)), ("stop_token_ids", "40")),
        (request(temperature=-1.0), ("-1.0",)),
        (request(temperature=float("nan")), ("temperature", "nan")),
        (request(top_p=0.0), ("top_p", "0.0")),
        (request(min_p=1.5), ("min_p", "1.5")),
        (request(repetition_penalty=0.0), ("repetition_penalty", "0.0")),
    ],
)
def test_invalid_requests_are_refused(asked, facts):
    with raises_error(DataError, *facts):
        check(asked)


def test_request_at_the_limits_is_accepted():
    check(request(max_new_tokens=5, top_p=1.0, min_p=1.0, temperature=0.0, stop_token_ids=(39,)))
    check(request(max_new_tokens=0, prompt_topk=40))


@pytest.mark.parametrize(
    ("params", "has_tokenizer", "error"),
    [
        ({"stop": ("a", "")}, True, DataError),
        ({"stop": ("a",)}, False, UnsupportedError),
        ({"stop": ("a",)}, True, None),
        ({"stop": ("", "a"), "ignore_eos": True}, False, None),
        ({}, False, None),
    ],
)
def test_stop_strings_are_checked_unless_ignore_eos_is_set(params, has_tokenizer, error):
    asked = request(**params)
    if error is None:
        check(asked, has_tokenizer=has_tokenizer)
        return
    with raises_error(error, "'r'"):
        check(asked, has_tokenizer=has_tokenizer)


IMAGE = image_media(picture(56, 84))
"""2 x 3 features of Qwen2.5-VL: one for 28 x 28 pixels."""


def with_images(num_tokens, *media):
    return replace(request(prompt=[7] + [IDS[IMAGE_TOKEN]] * num_tokens), media=media)


def test_images_need_an_engine_and_a_model_that_read_them():
    asked = replace(request(), media=(IMAGE,))
    with raises_error(UnsupportedError, "'r'", "1"):
        check(asked)
    check(asked, images=True)


@pytest.mark.parametrize(("num_tokens", "media"), [(5, (IMAGE,)), (6, ()), (0, (IMAGE,)), (6, (IMAGE, IMAGE))])
def test_image_tokens_must_be_as_many_as_features(tmp_path, num_tokens, media):
    write_processor(tmp_path, "qwen2_5_vl")
    processor = processor_of(AutoTokenizer.from_pretrained(tmp_path))
    with raises_error(DataError, "'r'", num_tokens, 6 * len(media)):
        processor.check(with_images(num_tokens, *media))
    processor.check(with_images(6 * len(media), *media))


def test_images_that_cannot_be_decoded_are_refused_by_request(tmp_path):
    write_processor(tmp_path, "qwen2_5_vl")
    with raises_error(DataError, "'r'"):
        processor_of(AutoTokenizer.from_pretrained(tmp_path)).check(with_images(6, replace(IMAGE, data=b"none")))
