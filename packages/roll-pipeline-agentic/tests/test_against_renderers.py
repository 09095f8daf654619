"""Incremental encoding and parsing beside `renderers` 0.1.12, which has the templates of model families as code."""

from __future__ import annotations

import json
import string
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import AddedToken

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from shared_tests.chat_templates import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.engine("renderers")

NAMES = {"qwen3": "qwen3", "qwen3.5": "qwen3.5", "llama3": "llama-3", "deepseek": "deepseek-v3", "glm": "glm-4.5"}
"""Renderers of families. That of gpt-oss downloads its vocabulary; of the others there is none."""
TOKENS = {
    "qwen3": ("<tool_response>", "</tool_response>"),
    "qwen3.5": (
        *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>"),
        *("<|image_pad|>", "<|video_pad|>"),
    ),
    "glm": ("<tool_response>", "</tool_response>", "/nothink"),
    "llama3": ("<|eom_id|>", "<|end_of_text|>"),
    "deepseek": (),
}
"""Tokens that renderers look up beside those of the template."""
OPENING = [{"role": "user", "content": "1 + 2?"}]
QUESTION = [{"role": "user", "content": "And then?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
RESULT = [{"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}]
CASES = (
    *("text", "cut", "blanks", "another end", "a system message"),
    *("reasoning", "cut reasoning", "call", "other call", "call and question", "result and question"),
    "reasoning and call",
)
ONLY_OURS: Mapping[str, set[str]] = {
    # renderers keeps these up to the next question, as if each reply had reasoning that the template removes.
    "qwen3": {"text", "cut", "blanks", "a system message", "cut reasoning", "call and question", "result and question"},
    "glm": {"text", "cut", "blanks", "reasoning", "cut reasoning", "result and question"},
}
ONLY_THEIRS: Mapping[str, set[str]] = {
    # The template removes the reasoning, and moves the system message to the front.
    "deepseek": {"reasoning", "a system message"},
}
OTHERWISE: Mapping[str, set[str]] = {
    # The template ends the turn; renderers writes `</think>` before that.
    "deepseek": {"cut reasoning"},
}
READ_OTHERWISE = {
    ("llama3", "other call"),  # no call for renderers, because it follows `<|python_tag|>`
    ("glm", "text"),  # reasoning for renderers, although neither prompt nor reply has `<think>`
}


@cache
def parts(name: str) -> tuple[Any, ChatEncoder, Any]:
    from renderers import config_from_name, create_renderer

    family = FAMILIES[name]
    config = TokenizerConfig(kind="char", alphabet=string.printable)
    tokenizer = make_tokenizer(config, [], Path(mkdtemp()), control_tokens=family.special)
    tokenizer.add_tokens(
        [AddedToken(each, special=False, normalized=False) for each in (*family.ordinary, *TOKENS.get(name, ()))]
    )
    tokenizer.eos_token, tokenizer.chat_template = family.end, family.template
    renderer = create_renderer(tokenizer, config_from_name(NAMES.get(name, "default")))
    return tokenizer, ChatEncoder(tokenizer, DataArguments(), where="test"), renderer


def reply(name: str, case: str) -> str | None:
    """What the model says; None if the family has no such reply."""
    family = FAMILIES[name]
    closed = "\n</think>\n\n" if name == "qwen3.5" else " " if name == "mistral" else ""
    if ("reasoning" in case and not family.thought) or ("call" in case and not family.call):
        return None
    end = family.call_end or family.end
    texts = {
        "cut": f"{closed}3",
        "blanks": f"{closed}3 \n{family.end}",
        "another end": f"{closed}3<|endoftext|>",
        "reasoning": f"{family.thought}3{family.end}",
        "cut reasoning": family.thought.partition("</think>")[0],
        "other call": family.other_call + end,
        "reasoning and call": family.thought + family.call.removeprefix("\n</think>\n\n") + end,
    }
    return texts.get(case, family.call + end if "call" in case or "result" in case else f"{closed}3{family.end}")


def following(case: str) -> list[dict[str, Any]]:
    if case == "a system message":
        return [{"role": "system", "content": "Be short."}, *QUESTION]
    if case == "result and question":
        return [*RESULT, *QUESTION]
    return RESULT if case.endswith("call") else QUESTION


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_after_a_reply(name: str, case: str) -> None:
    """The same tokens, or one of both encodes the conversation again where the template would permit to continue."""
    tokenizer, encoder, renderer = parts(name)
    text = reply(name, case)
    if text is None or (name == "llama3" and case == "another end"):
        pytest.skip("no such reply")
    tools = [TOOL] if "call" in case or "result" in case else []
    chat = encoder.encode(OPENING, tools)
    sampled = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    known = [*chat.ids.tolist(), *sampled.tolist()]
    extended = encoder.extend(chat, sampled, following(case))
    theirs = renderer.bridge_to_next_turn(chat.ids.tolist(), sampled.tolist(), following(case), tools=tools or None)
    ours = None if extended is None else extended.ids.tolist()
    bridged = None if theirs is None else list(theirs.token_ids)
    if case in ONLY_OURS.get(name, ()):
        assert (ours is not None, bridged) == (True, None)
    elif case in ONLY_THEIRS.get(name, ()):
        assert (ours, bridged is not None) == (None, True)
    else:
        assert (ours == bridged) == (case not in OTHERWISE.get(name, ()))
    for found in (ours, bridged):
        assert found is None or found[: len(known)] == known


@pytest.mark.parametrize("name", ["qwen2.5", "gemma", "mistral"])
def test_families_without_a_renderer_are_encoded_again(name: str) -> None:
    """Its `default` keeps no sampled token; our encoder does, by the template."""
    tokenizer, encoder, renderer = parts(name)
    chat = encoder.encode(OPENING)
    sampled = np.array(tokenizer(reply(name, "text"), add_special_tokens=False)["input_ids"], dtype=np.int64)
    assert encoder.extend(chat, sampled, QUESTION) is not None
    assert renderer.bridge_to_next_turn(chat.ids.tolist(), sampled.tolist(), QUESTION) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["text", "call", "other call", "reasoning and call"])
def test_parts_of_a_reply(name: str, case: str) -> None:
    tokenizer, encoder, renderer = parts(name)
    text = reply(name, case)
    if text is None:
        pytest.skip("no such reply")
    chat = encoder.encode(OPENING, [TOOL])
    sampled = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    ours = encoder.parse(sampled, chat)
    theirs = renderer.parse_response(sampled.tolist(), tools=[TOOL], prompt_ids=chat.ids.tolist())
    calls = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in ours.tool_calls]
    read = (calls, ours.content.strip(), ours.reasoning)
    others = [(each.name, each.arguments) for each in theirs.tool_calls]
    same = read == (others, theirs.content.strip(), (theirs.reasoning_content or "").strip())
    assert same == ((name, case) not in READ_OTHERWISE)
