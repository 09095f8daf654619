"""Conversations of a noisy oracle for `math_with_python`, and a tokenizer whose chat template knows tools.

In 30 % of the conversations the oracle guesses an answer without a call. In its calls and answers it changes each
number with a probability of 15 %.
"""

import argparse
import asyncio
import json
import random
import re
import string
from pathlib import Path

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.environment import Reply
from roll_environments.math_with_python import MathWithPython

OPERATIONS, DIGITS = 1, 2
GUESSES, MISTAKES = 0.3, 0.15
ROLES = ("system", "user", "assistant", "tool")
# Tools as a system message with their names, calls in the format `hermes`, one control token before each message.
TEMPLATE = """
{%- if tools %}<|system|>tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' ~ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Texts of one token, so that a call has few. All other tokens are characters.
WORDS = (
    *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'),
    *("What is ", "?\nUse the tool python. Then reply with the number.", "tools: python", "python", "expression"),
)


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer, which `sft.yaml` loads."""
    config = TokenizerConfig(kind="char", alphabet=string.printable)
    tokenizer = make_tokenizer(config, (), folder, control_tokens=[f"<|{role}|>" for role in ROLES])
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def noisy(text: str, rng: random.Random) -> str:
    """The text with another number of as many digits for some of its numbers."""

    def change(found: re.Match[str]) -> str:
        digits = len(found[0])
        return str(rng.randrange(10 ** (digits - 1), 10**digits)) if rng.random() < MISTAKES else found[0]

    return re.sub(r"\d+", change, text)


async def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Messages of one episode. The calls are part of the content, as the policy writes them."""
    environment = MathWithPython(num_operations=OPERATIONS, digits=DIGITS)
    opening = await environment.reset({}, rng.getrandbits(31))
    names = " ".join(tool["function"]["name"] for tool in opening.tools)
    messages = [{"role": "system", "content": f"tools: {names}"}, *(dict(each) for each in opening.messages)]
    if rng.random() < GUESSES:
        return [*messages, {"role": "assistant", "content": str(rng.randrange(10 ** (2 * DIGITS)))}]
    expression, _ = environment.oracle()
    function = {"name": "python", "arguments": {"expression": noisy(expression["expression"], rng)}}
    call = {"id": "", "type": "function", "function": function}
    turn = await environment.step(Reply(text="", tool_calls=(call,)))
    (result,) = turn.messages
    return [
        *messages,
        {"role": "assistant", "content": f"<tool_call>{json.dumps(function)}</tool_call>"},
        {"role": "tool", "content": result["content"]},
        {"role": "assistant", "content": noisy(result["content"], rng)},
    ]


async def main() -> None:
    """Write `data/tokenizer` and `data/sft.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder / "tokenizer")
    with (folder / "sft.jsonl").open("w", encoding="utf-8") as file:
        for index in range(given.episodes):
            file.write(json.dumps({"id": index, "messages": await conversation(rng)}) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
