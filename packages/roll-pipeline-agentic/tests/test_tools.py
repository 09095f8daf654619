"""Episodes with tools: the template describes them, calls of a reply reach the environment, and no token changes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_core.data.rollouts import rows
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.types import Reward
from roll_pipeline_agentic.calls import wire_arguments
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.environment_process import argument_from
from roll_pipeline_agentic.episodes import EpisodeGroup
from roll_testing.errors import raises_error
from shared_tests.chat_templates import FAMILIES

sys.path.insert(0, str(Path(__file__).parent))
from test_episodes import PROMPT, Config, Script, episodes

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Adder(Environment):
    """The reward is 1 for the sum after one call."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    async def reset(self, task: Any, seed: int) -> Opening:
        return Opening(messages=[{"role": "user", "content": "1 + 2?"}], tools=[ADD])

    async def step(self, reply: Reply) -> Turn:
        self.replies.append(reply)
        if not reply.tool_calls:
            return Turn(done=True)
        (call,) = reply.tool_calls
        values = json.loads(call["function"]["arguments"])
        content = str(values["a"] + values["b"])
        return Turn(messages=[{"role": "tool", "tool_call_id": call["id"], "content": content}])

    async def score(self) -> Reward:
        return Reward(value=float(self.replies[-1].text == "3"))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "mistral", "deepseek"])
@pytest.mark.parametrize("other", [False, True])
def test_a_call_reaches_the_environment_in_one_row(tmp_path: Path, name: str, other: bool) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path, control_tokens=family.special)
    # DeepSeek V3's own template renders calls, but describes no tools.
    shows = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" if name == "deepseek" else ""
    tokenizer.eos_token, tokenizer.chat_template = family.end, shows + family.template
    environment = Adder()
    shared = episodes(tokenizer, lambda: environment, Config(reply=200, total=4000))
    shared.encoders = {"guess": ChatEncoder(tokenizer, DataArguments(), where="custom_envs.guess")}
    call = family.other_call if other else family.call
    script = Script(tokenizer, [call + family.end, "3" + family.end])
    group = asyncio.run(EpisodeGroup(shared).run(script, PROMPT))
    (sample,) = group.samples
    assert sample.reward is not None
    assert sample.reward.value == 1.0
    first, second = environment.replies
    assert first.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert (first.text, first.reasoning, first.parse_error) == ("", "", None)
    assert (second.text, second.tool_calls) == ("3", ())
    assert sample.rollout is not None
    (row,) = rows(sample.rollout)
    assert call + family.end in tokenizer.decode(row.token_ids.tolist() if hasattr(row, "token_ids") else row.tokens)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
FLAT = "{% for t in tools or [] %}{{ t.name }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "tool_format", "fails"),
    [
        (TURNS, "auto", True),
        (TURNS, "hermes", True),
        ("use the tool add." + TURNS, "auto", True),
        ("{# <｜tool▁call▁begin｜> #}" + TURNS, "auto", True),
        ("{# <tool_call> #}" + FLAT + TURNS, "auto", True),
        ("{# <|tool_call_start|> #}" + NAMES + TURNS, "auto", True),
        ("{# <|tool_call_start|> #}" + NAMES + TURNS, "hermes", False),
        ("{# <|tool_call_start|> #}" + NAMES + TURNS, "none", False),
        ("{# <tool_call> #}" + NAMES + TURNS, "auto", False),
    ],
)
def test_tools_that_the_policy_cannot_use_end_the_run(
    tmp_path: Path, template: str, tool_format: str, fails: bool
) -> None:
    tokenizer = make_tokenizer(
        TokenizerConfig(kind="byte"), [], tmp_path, control_tokens=("<|im_start|>", "<|im_end|>")
    )
    tokenizer.chat_template = template
    shared = episodes(tokenizer, Adder, Config(reply=200, total=4000))
    encoder = ChatEncoder(tokenizer, DataArguments(), where="custom_envs.guess", tool_format=tool_format)
    shared.encoders = {"guess": encoder}
    assert encoder.describes_tools is (not fails and tool_format != "none")
    running = EpisodeGroup(shared).run(Script(tokenizer, ["3"]), PROMPT)
    if not fails:
        asyncio.run(running)
        return
    with raises_error(DataError, "custom_envs.guess", tmp_path):
        asyncio.run(running)


def test_a_reply_crosses_processes() -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    reply = Reply(text="", tool_calls=(call,), reasoning="why", parse_error="none")
    back = argument_from("step", json.loads(json.dumps(wire_arguments("step", (reply,))))[0])
    assert (list(back.tool_calls), back.reasoning, back.parse_error) == ([call], "why", "none")
