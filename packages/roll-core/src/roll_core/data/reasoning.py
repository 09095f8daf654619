"""Reasoning in responses: the formats in which models write it, and the answer that follows it.

<think> … </think> answer                      Qwen 3, DeepSeek R1; other models have other marks, see `MARKS`
… </think> answer                              where the prompt ends with <think>
<|channel|>analysis<|message|> … <|channel|>final<|message|>answer      gpt-oss
analysis … assistantfinalanswer                the same, decoded without special tokens
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<thought>": "</thought>",  # EXAONE Deep
    "<thinking>": "</thinking>",
    "<reasoning>": "</reasoning>",
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A Reasoning
}
"""What begins and ends a block of reasoning."""

# Quoted marks are part of a text or a program about reasoning.
_BEGIN = re.compile(rf"(?<![`\"'\w])(?:{'|'.join(map(re.escape, MARKS))})")
_END = re.compile("|".join(map(re.escape, MARKS.values())))
_CHANNEL_FINAL = re.compile(
    r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)(?:<\|(?:end|return|call)\|>|\Z)",
    re.DOTALL,
)
# The name of the channel and the message have nothing between them, unlike "analysis of the text" and "finally".
_BARE_CHANNEL = re.compile(
    r"\s*(?:(?:analysis|commentary)(?: to=|(?![\s:,.;!?)\-_=]|\Z))|(final)(?!ly|s\b|e\b|i[stz]|[\s:,.;!?)\-_=]|\Z))"
)


def answer_of(response: str, *, opened: bool = False) -> str | None:
    """The response without its reasoning; None if the response ends inside it.

    `opened`: the prompt ended inside a block of reasoning, see `opens_reasoning`.
    """
    if "<|channel|>" in response:
        finals = _CHANNEL_FINAL.findall(response)
        return finals[-1] if finals else None
    if channel := _BARE_CHANNEL.match(response):
        _, final, answer = response.rpartition("assistantfinal")
        return answer if final else response[channel.end() :] if channel[1] else None
    end = max((match.end() for match in _END.finditer(response)), default=0)
    if not end and opened:
        return None
    answer = response[end:]
    return None if _BEGIN.search(answer) else answer


def opens_reasoning(prompt: str) -> bool:
    """True if a prompt ends inside a block of reasoning, which the response continues."""
    return prompt.rstrip().endswith(tuple(MARKS))


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of a response without special tokens, except marks of reasoning: they separate it from the answer."""
    special, marks = _special_ids(tokenizer)
    if not marks.intersection(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([id for id in ids if id not in special or id in marks], skip_special_tokens=False))


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], frozenset[int]]:
    """Ids of all special tokens, and of those that are marks of reasoning."""
    texts = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = {*MARKS, *MARKS.values()}
    return frozenset(texts), frozenset(id for id, text in texts.items() if text in known)
